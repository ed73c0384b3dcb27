"""What a head tells the next one: how many frames were settled, and how many heads there were."""

import os
from pathlib import Path

from cormorant_api.errors import StoreError

_DIGITS = 20


class Journal:
    """Three small files in the head's directory; nothing without one. `settle` may be called from any thread."""

    def __init__(self, folder: Path | None, *, epoch: int = 0, floor_frames: int = 0) -> None:
        """Open it, and count this head.

        Args:
            folder: what earlier heads left; None: nothing.
            epoch: of this head, from 1, for whoever counts them elsewhere; 0: nobody does.
            floor_frames: frames that are known elsewhere to be settled.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.epoch = max(0, epoch - 1)
        """Heads before this one."""
        self.frames = floor_frames
        """Frames that earlier heads settled."""
        self.exported_frames = floor_frames
        """The highest count of frames that any head has told to scrapers: a counter must not go back."""
        self._descriptor = self._exported = -1
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.epoch = max(self.epoch, _next_epoch(folder / "epoch"))
            self._descriptor = os.open(folder / "frames", os.O_RDWR | os.O_CREAT, 0o600)
            text = os.pread(self._descriptor, _DIGITS, 0)
            self.frames = max(floor_frames, int(text) if text else 0)
            self._exported = os.open(folder / "exported", os.O_RDWR | os.O_CREAT, 0o600)
            text = os.pread(self._exported, _DIGITS, 0)
            self.exported_frames = max(self.frames, int(text) if text else 0)
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot use {folder} for the count of frames: {error}") from error

    def settle(self, frames: int) -> None:
        """This head has settled so many frames. One write in place: a killed process leaves the old count or this."""
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, f"{self.frames + frames:0{_DIGITS}d}".encode(), 0)

    def note_exported(self, frames: int) -> None:
        """Scrapers have been told so many frames, or are about to be. One thread at a time."""
        if frames > self.exported_frames:
            self.exported_frames = frames
            if self._exported >= 0:
                os.pwrite(self._exported, f"{frames:0{_DIGITS}d}".encode(), 0)

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self._exported >= 0:
            os.close(self._exported)
            self._exported = -1
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _next_epoch(path: Path) -> int:
    epoch = int(path.read_text()) + 1 if path.exists() else 0
    part = path.with_suffix(".part")
    part.write_text(str(epoch))
    part.replace(path)
    return epoch
