"""A small disk of its own for one schedule: it fills up, and is freed."""

import subprocess
from contextlib import suppress
from pathlib import Path

_BYTES = 32 << 20
_MAKE_FS = ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal")


class SmallDisk:
    """An ext4 in a file, mounted on `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = folder.with_name(f"{folder.name}.img")
        self.is_there = self._mount()
        """False: this process may not mount one."""

    def _mount(self) -> bool:
        with self._image.open("wb") as file:
            file.truncate(_BYTES)
        return _did(*_MAKE_FS, str(self._image)) and _did("mount", "-o", "loop", str(self._image), str(self._folder))

    def fill(self) -> None:
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(b"\1" * size):
                        pass

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """May be called twice."""
        if self.is_there:
            self.is_there = False
            _did("umount", "--lazy", str(self._folder))
        self._image.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self._folder / "ballast"


def _did(*command: str) -> bool:
    with suppress(FileNotFoundError):
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    return False
