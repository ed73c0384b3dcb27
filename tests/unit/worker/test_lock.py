import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cormorant_api.errors import StoreError
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_testing.collecting import make_job
from cormorant_worker.errors import DatasetError
from cormorant_worker.fleet.dataset_root import DatasetRoot
from cormorant_worker.lock import FolderLock, LockHeld


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "new" / "folder")
    with pytest.raises(LockHeld, match=rf"folder is in use by process {os.getpid()} on \S+ since 20\d\d-"):
        FolderLock(tmp_path / "new" / "folder")
    lock.release()
    lock.release()
    again = FolderLock(tmp_path / "new" / "folder")
    assert json.loads((tmp_path / "new" / "folder" / ".lock").read_text())["pid"] == os.getpid()
    again.release()


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


def test_a_dataset_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    root = DatasetRoot(str(tmp_path / "data"))
    with pytest.raises(DatasetError, match=rf"the dataset .*data is in use by process {os.getpid()} on"):
        DatasetRoot(f"file://{tmp_path}/data")
    root.close()
    DatasetRoot(str(tmp_path / "data")).close()


def test_directory_without_file_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:  # as a mount of an object store answers it
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", flock)
    words = r"^the head's directory .* is on a file system without file locks .*; use a local disk"
    with pytest.raises(StoreError, match=words):
        HeadServer(make_job(), HeadSettings(port=0, directory=tmp_path))
