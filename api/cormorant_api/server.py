"""The lifecycle of a head. Used by `__main__` and `cormorant run --serve`.

listen (503) -> fleet starts -> serve -> all delivered and acknowledged -> 0
                                 |-> SIGTERM, SIGINT: drain, at most drain_s -> 143, 130
                                 |-> the fleet failed                         -> its error
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog

from cormorant_api.app import make_app
from cormorant_api.errors import HeadFault, StoreError
from cormorant_api.head import Head
from cormorant_api.http.listener import Listener, check_tls
from cormorant_api.http.tokens import HeadTokens, Role
from cormorant_api.live.moments import Moments
from cormorant_api.settings import HeadSettings
from cormorant_api.status import wait_for_learner
from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import CormorantError, FleetInterrupted
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.stats import FleetStats
from cormorant_worker.fleet.transport import Engine
from cormorant_worker.lock import FolderLock, LockHeld, LocksUnsupported
from cormorant_worker.logs import LogContext

log = structlog.get_logger()

End = Literal["done", "interrupted", "drained"]
_LOOK_S = 0.1
_GONE_S = 1.0
"""A consumer that neither waits nor holds a batch for this long is considered gone."""
_UNLOCK_S = 5.0
_TOKEN_FILE = "tokens.json"


class HeadServer:
    """A head with its listeners and fleet. Use as a context manager."""

    def __init__(self, job: CollectorJob, settings: HeadSettings, context: LogContext | None = None) -> None:
        """Read tokens and the directory, and listen; HeadFault if settings, tokens, directory or port cannot be used.
        `context`: fields of this process's log lines; the server adds the epoch and the newest version.
        """
        settings.check()
        if settings.tls_cert is not None and settings.tls_key is not None:
            check_tls(settings.tls_cert, settings.tls_key)
        self.job, self.settings = job, settings
        self.token_file = settings.token_file if settings.has_tokens else None
        if settings.has_tokens and self.token_file is None:
            if settings.directory is not None:
                self.token_file = settings.directory / _TOKEN_FILE
            else:  # asked for last: a container's user may have no home
                self.token_file = Path.home() / ".cormorant" / f"{job.metadata.name}.tokens.json"
        self._lock = _lock(settings.directory)
        try:
            self.head = Head(job, settings, HeadTokens(self.token_file))
        except BaseException:
            self._unlock()
            raise
        self.head.log_context = context or LogContext()
        self.head.log_context.epoch = self.head.journal.epoch + 1
        self.fleet: WorkerFleet | None = None
        app = make_app(self.head)
        self.moments: Moments = app.state.live
        """Data of live pages and the report."""
        self._listeners: list[Listener] = []
        try:
            for name, port in zip(("control-port", "data-port"), settings.ports, strict=True):
                self._listeners.append(Listener(app, settings, port=port, name=name))
            self.head.data_port = self._listeners[1].port
            for listener in self._listeners:
                listener.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        scheme = "https" if self.settings.tls_cert is not None else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self._listeners[0].port}"

    @property
    def page_url(self) -> str:
        """URL of the live page. The fragment is the write token: browsers do not send it, and the page removes it from
        the address bar.
        """
        token = self.head.tokens.by_role.get(Role.WRITE, "")
        return f"{self.url}/#token={token}" if token else f"{self.url}/"

    def waits_for(self, stats: FleetStats) -> str:
        """Why no frames are collected; empty while they are."""
        return wait_for_learner(self.head, stats) if self.head.is_running else ""

    def start_fleet(
        self, options: FleetOptions, *, engine: Engine | None = None, make: Callable[..., WorkerFleet] = WorkerFleet
    ) -> WorkerFleet:
        """Start the workers, paused until they have the weights of an earlier head. `engine`: see `Fleet`; `make`:
        class of the fleet.
        """
        journal = self.head.journal
        options = replace(
            options,
            floor_frames=journal.frames,
            statistics=journal.statistics,
            epoch=journal.epoch,
            settled_frames=lambda: journal.settled_frames,
            starts_paused=True,
        )
        fleet = self.fleet = make(self.job, options, engine=engine)
        self.moments.start(fleet.stats(workers=False), since=time.time())
        self.head.attach(fleet, is_paused=True)
        log.info("head_ready", url=self.url, data_port=self.head.data_port, token_file=str(self.token_file or ""))
        return fleet

    def wait(self, should_stop: Callable[[], bool], look: Callable[[FleetStats], None] | None = None) -> End:
        """Serve until the job is complete or `should_stop`. Then drain: give consumers, if there are any, up to
        `drain_s` to take and acknowledge the last batches. Raises the fleet's error if it failed.
        """
        assert self.fleet is not None
        while not should_stop():
            if self.head.is_complete:
                if self.fleet.episodes is not None:
                    self.fleet.episodes.finish()
                # Let consumers receive the end of the stream, and callers the whole evaluation table, instead of a
                # refused connection.
                self.head.events.notifier.notify()
                is_awaited = self.head.has_queue or self.job.spec.collection.episodes is not None
                time.sleep(self.settings.linger_s if is_awaited else 0.0)
                return "drained" if self.head.is_draining else "done"
            if look is not None:
                look(self.fleet.stats())
            time.sleep(_LOOK_S)
        log.info("drain_began", who="signal", seconds=self.settings.drain_s)
        now = time.monotonic()
        deadline = now + self.settings.drain_s
        self.head.drain()
        running = self.head.running
        # A consumer holds and awaits nothing between an acknowledgement and its next request: allow a gap. Without a
        # queue, the open batches get as long: the head's last count has them.
        seen_at = now if running.ledger.consumers() or not self.head.has_queue else -math.inf
        while now < deadline and now - seen_at < _GONE_S and not self.head.is_complete:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if running.feeder.num_waiting or running.ledger.counts().lent:
                seen_at = now
        return "interrupted"

    def close(self) -> None:
        """End all waits, then stop listeners and workers concurrently. May be called twice."""
        self.head.close()
        stops = [threading.Thread(target=listener.stop, daemon=True) for listener in self._listeners]
        for stop in stops:
            stop.start()
        try:
            if self.fleet is not None:
                self.fleet.close()
        finally:
            for stop in stops:
                stop.join()
            self._unlock()

    def __enter__(self) -> "HeadServer":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close, and record the error in the termination message."""
        if self.fleet is not None and self.head.is_running:
            self.head.keep_settled_frames(self.fleet.stats(workers=False))
        if isinstance(error, Exception) and not isinstance(error, FleetInterrupted):
            is_sentence = isinstance(error, (CormorantError, HeadFault))
            reason = str(error) if is_sentence else f"{type(error).__name__}: {error}"
            self.head.failure = self.head.failure or reason
            self.head.journal.explain(reason)
        self.close()

    def _unlock(self) -> None:
        if self._lock is None:
            return
        release = threading.Thread(target=self._lock.release, daemon=True)
        release.start()
        release.join(_UNLOCK_S)
        if release.is_alive():
            reason = f"the disk of {self.settings.directory} did not answer within {_UNLOCK_S:.0f} s"
            log.warning("lock_not_released", reason=f"{reason}; the lock ends with this process")


def _lock(directory: Path | None) -> FolderLock | None:
    """Lock the directory: two heads would mix their frame counts and weights versions."""
    if directory is None:
        return None
    try:
        return FolderLock(directory)
    except LockHeld as error:
        raise StoreError(f"the head's directory {error}; stop that head first, or use another --directory") from None
    except LocksUnsupported as error:
        raise StoreError(f"the head's directory {error}") from error
    except OSError as error:
        raise StoreError(
            f"cannot write to {directory}: {error.strerror or error}; mount it writable for this user, free space on "
            "it, or use another --directory"
        ) from error
