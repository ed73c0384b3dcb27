"""The journal, which outlives a head: counts of heads, settled frames and exported frames, and statistics."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import structlog

from cormorant_api.errors import StoreError
from cormorant_contract.disk import sync_path, write_durably
from cormorant_worker.errors import StateError
from cormorant_worker.normalize import Statistics
from cormorant_worker.pod_files import termination_message

log = structlog.get_logger()

_COUNTS, _STATISTICS = "journal", "statistics.json"
_LINE = b"%020d %020d %020d\n"
_SYNC_EVERY_S = 1.0
_EXPORT_WITHIN_S = 0.5
_ANSWER_WITHIN_S = 10.0


class Journal:
    """A small file, or memory only. Methods may be called from any thread.

    In the head's directory: `journal`, one line with the epoch, the settled and the exported frames; where the manifest
    normalizes, `statistics.json`: the statistics and the frames that were settled with them in one file, so that
    neither counts without the other. Optionally elsewhere: the termination message (`{"frames": 1000}`), kept current
    because a killed head cannot write it.

    A disk that fails while the head runs is logged once; acknowledgements stay valid, and the next count overwrites the
    last. `journal` has its full size from the start and is written in place, which also works on a full disk. It is
    synced once a second, so that acknowledgements do not wait for a sync each; a power failure may take back the last
    second.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        epoch: int = 0,
        floor_frames: int = 0,
        termination_message_file: Path | None = None,
    ) -> None:
        """Open it, and count this head; StoreError if a file cannot be used. `folder`: None: memory only. `epoch`:
        number of this head, from 1; 0: count in `folder`. `floor_frames`: frames that are known to be settled, e.g.
        from the job's status.
        """
        self.epoch = max(0, epoch - 1)
        """Number of earlier heads."""
        self.frames = floor_frames
        """Frames that earlier heads settled."""
        self.exported_frames = floor_frames
        """Highest frame count that any head has exported: a Prometheus counter must not decrease."""
        self.statistics: Statistics | None = None
        """Statistics of the frames that earlier heads settled; None: there are none."""
        self._folder = folder
        self._lock = threading.Lock()
        """Guards the counts and statistics; held only briefly, never during a write."""
        self._telling = threading.Lock()
        """Guards the termination message, which may be on another disk."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._newest: Future[None] = Future()
        """Result of the newest write."""
        self._newest.set_result(None)
        self._unkept: Statistics | None = None
        """Statistics not written yet."""
        self._is_synced, self._sync_at = True, 0.0
        """Whether the counts are synced, and when to sync them next."""
        self._is_closed = False
        self._descriptor = self._message = -1
        self._reason, self._width = "", 0
        self._failing: set[str] = set()
        """Log events of failures since the disk last worked."""
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(folder / _COUNTS, os.O_RDWR | os.O_CREAT, 0o600)
                line = os.pread(self._descriptor, len(_LINE % (0, 0, 0)), 0)
                last_epoch, settled, exported = map(int, line.split()) if line else (-1, 0, 0)
                self.epoch, self.frames = max(self.epoch, last_epoch + 1), max(self.frames, settled)
                if (folder / _STATISTICS).exists():
                    kept = json.loads((folder / _STATISTICS).read_text())
                    self.statistics = Statistics.of_document(kept["statistics"])
                    self.frames = max(self.frames, int(kept["frames"]))
                self.exported_frames = max(self.frames, exported)
            self.settled_frames = self.frames
            """Frames of this and earlier heads that no later head collects again."""
            self._exporting, self._reserved_epoch = self.exported_frames, self.epoch
            self._written = (-1, -1, -1)
            self._write_counts(is_sync_due=True)  # an epoch lost in a power failure would be used twice
            if folder is not None:
                sync_path(folder)
        except (OSError, ValueError, KeyError, StateError) as error:
            raise StoreError(f"cannot use {folder} for the frame count: {error}") from error
        if termination_message_file is not None:
            try:
                self._message = os.open(termination_message_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            except OSError as error:
                raise StoreError(
                    f"cannot write the termination message to {termination_message_file}: {error}"
                ) from error
            self._write_message()

    def settle(self, frames: int, statistics: Statistics | None = None) -> "Future[None]":
        """Set the frames that all heads have settled, with their statistics; a lower count is ignored. A killed process
        leaves both old or both new. Never waits for the disk: the future is done once both are written, in one write
        with other settlements since the last, or once a failure of the disk is logged.
        """
        with self._lock:
            self.settled_frames = max(self.settled_frames, frames)
            if statistics is not None:
                self._unkept = statistics
            is_sync_due = not self._is_synced and time.monotonic() >= self._sync_at
            if self._unkept is not None or self.settled_frames != self._written[1] or is_sync_due:
                self._ask_to_write()
            return self._newest

    def _ask_to_write(self) -> None:
        """One write covers everything that was settled before it begins. Called with `_lock` held."""
        if not self._is_closed and (self._newest.running() or self._newest.done()):
            self._newest = self._writer.submit(self._write)

    def _write(self, *, is_last: bool = False) -> None:
        with self._lock:
            settled, statistics, exporting = self.settled_frames, self._unkept, self._exporting
        if statistics is not None:
            with self._failures_logged("statistics_not_kept"):
                if self._folder is not None:
                    text = json.dumps({"frames": settled, "statistics": statistics.document()})
                    write_durably(self._folder / _STATISTICS, text.encode())
                with self._lock:
                    self._unkept = None if self._unkept is statistics else self._unkept
        with self._failures_logged("frames_not_kept"):
            self._write_counts(is_sync_due=is_last)
        self.exported_frames = exporting  # also where the disk failed: scrapes go on

    def _write_counts(self, *, is_sync_due: bool) -> None:
        with self._lock:
            counts = self._reserved_epoch, self.settled_frames, self._exporting
        if counts != self._written:
            if self._descriptor >= 0:
                os.pwrite(self._descriptor, _LINE % counts, 0)
                self._is_synced = False
            with self._telling:
                self._write_message()
            self._written = counts
        if not self._is_synced and (is_sync_due or time.monotonic() >= self._sync_at):
            os.fdatasync(self._descriptor)
            self._is_synced, self._sync_at = True, time.monotonic() + _SYNC_EVERY_S

    def explain(self, reason: str) -> None:
        """Record why this head ends, in the termination message."""
        with self._telling:
            self._reason = reason
            with self._failures_logged("last_words_not_kept"):
                self._write_message()

    def note_exported(self, frames: int) -> int:
        """Record a frame count before it is exported to scrapers. Returns the highest count that may be exported, which
        is lower while the disk does not respond.
        """
        with self._lock:
            self._exporting = max(self._exporting, frames)
            if self._descriptor < 0:
                self.exported_frames = self._exporting
            elif self._exporting > self.exported_frames:
                self._ask_to_write()
            newest = self._newest
        if frames > self.exported_frames:
            wait([newest], _EXPORT_WITHIN_S)
        return self.exported_frames

    def reserve_epoch(self, epoch: int) -> None:
        """Reserve an epoch that a restored state uses: later heads get higher ones. Waits like `await_write`."""
        with self._lock:
            if self._folder is None or epoch <= self._reserved_epoch:
                return
            self._reserved_epoch = epoch
        self.await_write(self._writer.submit(self._write_counts, is_sync_due=True))

    def await_write(self, asked: "Future[None]") -> None:
        """Wait until a write is done; StoreError if it fails or the disk does not respond."""
        try:
            asked.result(_ANSWER_WITHIN_S)
        except TimeoutError:
            raise StoreError(
                f"the disk of {self._folder} did not answer within {_ANSWER_WITHIN_S:.0f} s; retry"
            ) from None
        except OSError as error:
            raise StoreError(f"cannot write to {self._folder}: {error}; free space on the disk") from error

    def close(self) -> None:
        """Write the settled counts, and close the files; does not wait for a disk that does not respond. May be called
        twice.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            last = self._writer.submit(self._write_last)
        self._writer.shutdown(wait=False)
        if not wait([last], _ANSWER_WITHIN_S).done:
            unwritten = f"{self.settled_frames - self._written[1]:,} frames may be collected again"
            reason = f"the disk did not answer within {_ANSWER_WITHIN_S:.0f} s; {unwritten}"
            log.warning("journal_not_closed", folder=str(self._folder), reason=reason)

    def _write_last(self) -> None:
        self._write(is_last=True)
        with self._telling:
            for descriptor in (self._descriptor, self._message):
                if descriptor >= 0:
                    os.close(descriptor)
            self._descriptor = self._message = -1

    @contextmanager
    def _failures_logged(self, event: str) -> Iterator[None]:
        """Within the block, log a failing disk once until it works again."""
        try:
            yield
        except OSError as error:
            if event not in self._failing:
                log.warning(event, folder=str(self._folder), reason=f"{error}; free space on the disk")
            self._failing.add(event)
        else:
            self._failing.discard(event)

    def _write_message(self) -> None:
        if self._message < 0:
            return
        # Pad with blanks instead of truncating: a truncated file would be empty for a moment.
        text = termination_message(self.settled_frames, self._reason).ljust(self._width)
        self._width = len(text)
        os.pwrite(self._message, text, 0)
