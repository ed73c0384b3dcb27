"""Messages and descriptors between processes: whole, in order, and without a wait; and what wakes a thread; locks."""

import errno
import os
import select
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cormorant_api.errors import StoreError
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_testing.collecting import make_job
from cormorant_worker.errors import DatasetError
from cormorant_worker.fleet.connections import Waker
from cormorant_worker.fleet.dataset_root import DatasetRoot
from cormorant_worker.lock import FolderLock, LockHeld
from cormorant_worker.wire import MessageSocket, PeerGone


def pair(key: bytes = b"") -> tuple[MessageSocket, MessageSocket]:
    """One that does not block, and its peer, which does."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(10)
    return MessageSocket(ours, key), MessageSocket(theirs, key)


def test_messages_and_descriptors_arrive_in_order() -> None:
    ours, theirs = pair()
    with closing(ours):
        read, write = os.pipe()
        other_read, other_write = os.pipe()
        ours.send("small")
        ours.send("with files", write, other_write)
        ours.send("after it")
        assert theirs.receive() == ("small", ())
        message, descriptors = theirs.receive()
        assert message == "with files"
        for descriptor, data, end in zip(descriptors, (b"first", b"second"), (read, other_read), strict=True):
            assert not os.get_inheritable(descriptor)
            os.write(descriptor, data)
            assert os.read(end, 100) == data
        assert theirs.receive() == ("after it", ())
        for size in (0, 1, 100_000):
            theirs.send(b"x" * size)
            assert ours.wait(10)
            assert ours.receive() == (b"x" * size, ())
        theirs.close()
        with pytest.raises(PeerGone):
            ours.receive()
        with pytest.raises(PeerGone):
            ours.send("anybody there")


def test_a_peer_that_does_not_read_costs_memory_and_no_time() -> None:
    ours, theirs = pair()
    with closing(ours), closing(theirs):
        read, write = os.pipe()
        for number in range(500):
            ours.send((number, b"x" * 10_000), *([write] if number == 499 else []))
        os.close(write)  # the message has its own
        assert ours.has_unsent
        descriptors: tuple[int, ...] = ()
        for number in range(500):
            message, descriptors = theirs.receive()
            assert message == (number, b"x" * 10_000)
            ours.flush()
        assert not ours.has_unsent
        os.write(descriptors[0], b"late")
        assert os.read(read, 10) == b"late"


def test_half_a_message_is_kept_until_the_rest_comes() -> None:
    ours, theirs = pair()
    with closing(ours), closing(theirs):
        theirs.send({"a": 1})
        data = ours.socket.recv(1000)
        for part in (data[:3], data[3:15]):
            theirs.socket.sendall(part)
            with pytest.raises(BlockingIOError):
                ours.receive()
        theirs.socket.sendall(data[15:] + data)
        assert ours.receive() == ({"a": 1}, ())
        assert ours.wait(0)  # the next one was left in the socket
        assert ours.receive() == ({"a": 1}, ())
        assert not ours.wait(0)


class Exploding:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.putenv, ("CORMORANT_EXPLODED", "yes")  # would run where it is unpickled


def test_a_message_signed_with_another_key_is_not_unpickled() -> None:
    ours, theirs = pair()
    with closing(ours), closing(theirs):
        ours.key, theirs.key = b"ours", b"theirs"
        theirs.send(Exploding())
        with pytest.raises(ConnectionRefusedError, match="authentication code"):
            ours.receive()
        theirs.key = b"ours"
        theirs.send("friend")
        assert ours.receive() == ("friend", ())


def test_wake_never_waits_and_writes_to_no_other_file_after_close() -> None:
    waker, (read, stranger) = Waker(), os.pipe()
    for times in (200_000, 1):  # it counts them once
        for _ in range(times):
            waker.wake()
        assert select.select([waker], [], [], 0)[0] == [waker]
        waker.clear()
        assert select.select([waker], [], [], 0)[0] == []
    descriptor = waker.fileno()
    waker.close()
    os.dup2(stranger, descriptor)
    waker.wake()
    assert not select.select([read], [], [], 0)[0], "the waker wrote into a pipe that is not its own"
    waker.close()
    for each in (read, stranger, descriptor):
        os.close(each)


# -- who holds a folder ------------------------------------------------------------------------------------------


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cormorant_worker.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(LockHeld, match=rf"is in use by process {process.pid} on"):
            FolderLock(tmp_path)
        process.kill()
    FolderLock(tmp_path).release()


def test_a_released_folder_is_free_though_a_forked_process_lives(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with subprocess.Popen(["sleep", "60"], pass_fds=(lock._descriptor,)) as heir:
        lock.release()
        FolderLock(tmp_path).release()
        heir.kill()


def test_a_dataset_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    root = DatasetRoot(str(tmp_path / "data"))
    with pytest.raises(DatasetError, match=rf"the dataset .*data is in use by process {os.getpid()} on"):
        DatasetRoot(f"file://{tmp_path}/data")
    root.close()
    root.close()
    DatasetRoot(str(tmp_path / "data")).close()


def test_directory_without_file_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:  # as a mount of an object store answers it
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", flock)
    words = r"^the head's directory .* is on a file system without file locks .*; use a local disk"
    with pytest.raises(StoreError, match=words):
        HeadServer(make_job(), HeadSettings(port=0, directory=tmp_path))
