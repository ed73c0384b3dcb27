"""The bell of a fleet's thread."""

import os
import select

from cormorant_worker.fleet.waker import Waker


def is_heard(bell: Waker) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_ringing_never_waits_however_often() -> None:
    bell = Waker()
    for _ in range(200_000):  # more than a pipe holds
        bell.ring()
    assert is_heard(bell)
    bell.hush()
    assert not is_heard(bell)
    bell.ring()
    assert is_heard(bell)
    bell.close()


def test_ringing_after_close_writes_to_nobody_elses_file() -> None:
    bell = Waker()
    write = bell._write
    bell.close()
    read, stranger = os.pipe()
    if stranger != write:
        os.dup2(stranger, write)
    bell.ring()
    os.set_blocking(read, False)
    try:
        assert os.read(read, 10) == b"never"
    except BlockingIOError:
        pass
    else:
        raise AssertionError("the bell wrote into a pipe that is not its own")
    bell.close()
