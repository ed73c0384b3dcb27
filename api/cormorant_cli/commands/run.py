"""`cormorant run MANIFEST`: a CollectorJob without Kubernetes, on this machine or (`--fleet ray`) a Ray cluster; with
`--serve`, under the head's REST API. Only this module of the command line may import the worker and the head, and only
in function bodies.

    reading -> starting -> collecting -> closing -> 0, or 1 when a worker failed for good
       |           |            |           |
     2, 130        +--- Ctrl-C -+           +--- a second Ctrl-C: every process is killed, 130
                        |
                        +-> closing -> 130
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from cormorant_cli.errors import INTERRUPTED, BadInput, CliError, CommandFailed, installed
from cormorant_cli.printing import say_end
from cormorant_cli.progress import Display, Rate, RunPlan, Summary, choose_display
from cormorant_contract.disk import local_path, write_durably
from cormorant_contract.errors import ManifestError, missing_library
from cormorant_contract.job import CollectorJob
from cormorant_manifest.reader import STDIN, load_jobs

if TYPE_CHECKING:
    from cormorant_api.live.moments import Moments
    from cormorant_api.server import HeadServer
    from cormorant_api.settings import HeadSettings
    from cormorant_worker.fleet.fleet import WorkerFleet
    from cormorant_worker.fleet.options import FleetOptions, RayOptions
    from cormorant_worker.fleet.stats import FleetStats
    from cormorant_worker.fleet.transport import Engine

Reason = Literal["done", "already_complete", "interrupted"]
_POLL_S = 0.2
_SERVE_DRAIN_S = 1.5
_LINGER_S = 2.0
_GRACE_S = 1.0
_DRAIN_S = 3.0
"""Time for workers to finish; closing takes at most five seconds in all."""
_TOO_EARLY = "interrupted before the first frame"

WORKERS, SERVING = (partial(typer.Option, rich_help_panel=it) for it in ("Workers", "Serving"))
"""Options in a panel of the help."""
FleetKind = Literal["local", "ray"]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], WORKERS("--device", help="Device of the policies (auto: as in the worker groups).")
]
FleetOption = Annotated[
    FleetKind, WORKERS("--fleet", help="local: processes on this machine; ray: actors on a Ray cluster.")
]
_RAY_HELP = 'Ray cluster for --fleet ray: "auto" or host:port (empty: start one).'
RayAddress = Annotated[str, WORKERS("--ray-address", envvar="RAY_ADDRESS", help=_RAY_HELP)]


def run(
    manifest: Annotated[
        str, typer.Argument(metavar="MANIFEST", help="CollectorJob manifest in YAML; - reads standard input.")
    ],
    workers: Annotated[
        int, WORKERS(min=0, help="Number of workers (0: as in the manifest, at most one per core).")
    ] = 0,
    device: DeviceOption = "auto",
    fleet: FleetOption = "local",
    ray_address: RayAddress = "",
    frames: Annotated[int, typer.Option(min=0, help="Frames to collect (0: totalFrames of the manifest).")] = 0,
    serve: Annotated[
        bool, SERVING("--serve", help="Serve the REST API and the live page; learners take batches over HTTP.")
    ] = False,
    port: Annotated[
        int | None,
        SERVING(min=0, max=65534, help="Port of the REST API (default: 8000); bulk data uses the next one."),
    ] = None,
    directory: Annotated[
        Path | None, SERVING(help="Folder that keeps weights, tokens and the frame count between runs.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every event as it is.")] = False,
) -> None:
    """Run a manifest on this machine, without Kubernetes.

    Ctrl-C finishes the current batches and exits within five seconds; a second one stops at once. Exits with 0 when
    all frames are collected, 1 when collection failed, 2 when the manifest is invalid, 130 when interrupted. --json
    prints JSON Lines.
    """
    display = choose_display(is_verbose=verbose)
    interrupts = Interrupts(display)
    with interrupts.installed():
        try:
            job = read_job(manifest, frames)
            if job.spec.collection.episodes is not None and not serve:
                raise BadInput(f"{job.metadata.name} is an evaluation; run it with: cormorant evaluate {manifest}")
            dataset = job.spec.output.dataset
            folder = local_path(dataset.uri) if dataset is not None else None
            report = Path(f"{folder}-report.html") if folder is not None else None
            with translated_errors(), logged_to(display, logging.INFO):
                serving = (8000 if port is None else port, directory) if serve else None
                session = _Session(job, display, interrupts, ray_options(fleet, ray_address), serving, report)
                reason = session.run(workers, None if device == "auto" else device)
        except KeyboardInterrupt:
            reason = "interrupted"
            display.fail(_TOO_EARLY, INTERRUPTED)
        except (CliError, ManifestError) as error:
            display.fail(str(error), getattr(error, "exit_code", 2))
            raise
        finally:
            display.close()
    if reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def ray_options(fleet: FleetKind, ray_address: str) -> "RayOptions | None":
    """The Ray cluster of the workers; None: this machine."""
    if fleet == "local":
        return None
    from cormorant_worker.fleet.options import RayOptions

    return RayOptions(address=ray_address or None)


class Interrupts:
    """SIGINT and SIGTERM. The first one ends the process during imports, raises during the start of workers, and later
    only sets `requested`. The second one kills all child processes and exits.
    """

    def __init__(self, display: Display) -> None:
        self.requested = False
        self._display = display
        self.phase: Literal["importing", "starting", "collecting"] = "importing"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals within the block. Main thread only."""
        with installed("worker"):
            import psutil  # noqa: F401  # for `_end`, which may interrupt another import of it

        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except Exception as error:
            if self.requested and self.phase == "starting":  # interrupted code may raise any error
                raise KeyboardInterrupt from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self._display.close()
            self._end()
        self.requested = True
        if self.phase == "importing":  # the imported module might swallow an exception
            self._display.fail(_TOO_EARLY, INTERRUPTED)
            say_end("interrupted", INTERRUPTED)
            sys.stdout.flush()
            self._end()
        if self.phase == "starting":
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        import psutil

        # Workers, and environments in their own processes.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(INTERRUPTED)


def read_job(manifest: str, frames: int = 0) -> CollectorJob:
    job, *others = load_jobs(manifest)
    if others:
        source = "standard input" if manifest == STDIN else manifest
        raise BadInput(f"{source} contains {len(others) + 1} CollectorJobs; put each into a file of its own")
    folder = str(Path(manifest).resolve().parent)  # the working directory with standard input
    if folder not in sys.path:
        # Like `code` in pods: entrypoints find the modules beside the manifest. Workers inherit the path.
        sys.path.insert(0, folder)
    if not frames:
        return job
    collection = job.spec.collection.model_copy(update={"total_frames": frames})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"collection": collection})})


@dataclass(slots=True)
class _Session:
    _job: CollectorJob
    _display: Display
    _interrupts: Interrupts
    _ray: "RayOptions | None"
    _serving: tuple[int, Path | None] | None = None
    """Port and directory of a head; None: no head serves the fleet."""
    _report: Path | None = None
    _rate: Rate = field(default_factory=Rate)
    _due: float = 0.0
    """Time of the next progress line."""
    _began: "tuple[float, FleetStats]" = field(init=False)
    """When all workers had started, and what they had collected by then."""

    def run(self, workers: int, device: str | None) -> Reason:
        """Start, collect, close, sum up. KeyboardInterrupt while workers are being started."""
        from cormorant_worker.fork_server import WORKERS, fork_server

        if self._ray is None:
            fork_server(WORKERS)  # workers' modules are imported in parallel with the fleet's
        from cormorant_worker.errors import EnvError
        from cormorant_worker.fleet.options import FleetOptions, default_workers
        from cormorant_worker.launch import refuse_unknown_names

        # More workers than its processors bring no speed.
        is_this_machine = self._ray is None or self._ray.address is None
        env, output = self._job.spec.env, self._job.spec.output
        uri = output.dataset.uri if output.dataset is not None else ""
        replicas = workers or default_workers(self._job, is_this_machine=False)
        workers = workers or default_workers(self._job, is_this_machine=is_this_machine)
        try:
            refuse_unknown_names(self._job, is_this_machine=is_this_machine)
        except EnvError as error:
            raise BadInput(str(error)) from error
        plan = RunPlan(
            job=self._job.metadata.name,
            env=f"{env.block.title} {env.name}, {env.num_envs} per worker",
            workers=workers,
            replicas=replicas,
            total_frames=self._job.spec.target,
            dataset=uri,
            counts=self._job.spec.counts,
        )
        settings = None if self._serving is None else _head_settings(*self._serving)
        self._display.begin(plan)
        options = FleetOptions(workers=workers or None, device=device, drain_timeout_s=_DRAIN_S)
        with self._opened(options, settings) as (fleet, server):
            self._interrupts.phase = "collecting"
            began, before = self._began
            # A short job may have ended by now.
            is_old = before.is_collected and before.frames == fleet.found_frames
            reason: Reason = "already_complete" if is_old else self._collect(fleet, server)
            seconds = time.monotonic() - began
        stats = fleet.stats().summary()
        summary = Summary(
            reason=reason,
            stats=stats,
            new_frames=stats.frames - fleet.found_frames,
            seconds=seconds,
            fps=(stats.frames - before.frames) / seconds,
            dataset=uri,
            report=str(self._report) if self._report is not None and self._report.exists() and not is_old else "",
        )
        self._display.end(summary)
        return reason

    @contextmanager
    def _opened(
        self, options: "FleetOptions", settings: "HeadSettings | None"
    ) -> "Iterator[tuple[WorkerFleet, HeadServer | None]]":
        engine: Engine | None = None
        if self._ray is not None:
            with installed("ray"):
                from cormorant_worker.fleet.ray.engine import RayEngine
            engine = RayEngine(self._ray)
        if settings is None:
            from cormorant_worker.fleet.fleet import WorkerFleet

            self._interrupts.phase = "starting"
            with WorkerFleet(self._job, options, engine=engine) as fleet, self._recorded(self._start_clock(fleet)):
                yield fleet, None
            return
        with installed("api"):
            from cormorant_api.server import HeadServer

        self._interrupts.phase = "starting"
        with _refused_by_head():
            server = HeadServer(self._job, settings)
        try:
            with server:
                yield self._start_clock(server.start_fleet(options, engine=engine)), server
        finally:
            self._write_report(server.moments)

    def _start_clock(self, fleet: "WorkerFleet") -> "WorkerFleet":
        """All workers have started; they collect while the recorder is imported."""
        self._began = time.monotonic(), fleet.stats()
        self._rate.observe(self._began[0], self._began[1].stepped_frames)
        return fleet

    @contextmanager
    def _recorded(self, fleet: "WorkerFleet") -> Iterator[None]:
        """Record the history of a fleet without a head, and write its report at the end."""
        if self._report is None:
            yield
            return
        try:
            from cormorant_api.live.moments import Recorder
        except ModuleNotFoundError as error:
            self._report = None
            sentence = missing_library(error, "api", what="no report is written: it")
            self._display.log({"level": "warning", "event": sentence})
            yield
            return
        with _refused_by_head():
            recorder = Recorder(self._job, fleet, since=time.time() - (time.monotonic() - self._began[0]))
        try:
            with recorder:
                yield
        finally:
            self._write_report(recorder.moments)

    def _write_report(self, moments: "Moments") -> None:
        """Write the report of a run that collected frames."""
        from cormorant_api.live.moments import report_of

        head = moments.head
        if self._report is None or not head.is_running:
            return
        fleet = head.running.fleet
        if fleet.stats(workers=False).frames > fleet.found_frames:
            try:
                write_durably(self._report, report_of(moments).encode())
            except OSError as error:
                self._display.log({"level": "warning", "event": f"cannot write the report: {error}"})

    def _collect(self, fleet: "WorkerFleet", server: "HeadServer | None") -> Reason:
        """Consume the queue, if there is one and no head serves it, and show progress until all frames are collected or
        Ctrl-C.
        """
        if server is not None:
            self._display.serving(server.url, page=server.page_url, token_file=str(server.token_file or ""))
            end = server.wait(lambda: self._interrupts.requested, look=lambda stats: self._show(stats, server))
            return "interrupted" if end == "interrupted" else "done"
        from cormorant_worker.errors import ControlTimeout

        has_queue = self._job.spec.output.queue is not None
        while not self._interrupts.requested:
            try:
                is_done = fleet.skip(timeout_s=_POLL_S) == 0 if has_queue else fleet.wait_until_done(_POLL_S)
            except ControlTimeout:
                if not has_queue:
                    raise
                is_done = False  # not an error: progress is shown, then the wait continues
            if is_done:
                return "done"
            self._show(fleet.stats())
        return "interrupted"

    def _show(self, stats: "FleetStats", server: "HeadServer | None" = None) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._display.interval_s
            waits_for = server.waits_for(stats) if server is not None else ""
            fps = self._rate.observe(now, stats.stepped_frames) * (not stats.paused)
            self._display.progress(stats, fps, waits_for)


def _head_settings(port: int, directory: Path | None) -> "HeadSettings":
    """Settings of a head that listens already: a port in use is found before workers start, and before the head is
    imported, which takes seconds.
    """
    with installed("api"):
        from cormorant_api.settings import HeadSettings, listen_early
    settings = HeadSettings(
        port=port, directory=directory, drain_s=_SERVE_DRAIN_S, grace_s=_GRACE_S, linger_s=_LINGER_S
    )
    with _refused_by_head():
        listen_early(settings.host, *settings.ports)
    return settings


@contextmanager
def _refused_by_head() -> Iterator[None]:
    """Turn settings that a head rejects into BadInput."""
    from cormorant_api.errors import HeadFault

    try:
        yield
    except HeadFault as error:
        raise BadInput(str(error)) from error


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the worker's errors into the command line's, which have exit codes."""
    with installed("worker"):
        from cormorant_worker import errors as worker
    try:
        with installed("worker"):
            yield
    except worker.DeviceUnavailable as error:
        raise BadInput(f"{error}; or run on this machine with --device cpu") from error
    except worker.CormorantError as error:
        # Only a worker can check some of the input: what a policy writes, which ids are registered, what weights fit.
        kind = getattr(worker, getattr(error, "kind", ""), type(error))  # that of a WorkerFailed is the worker's error
        is_refused = issubclass(kind, (worker.ManifestError, worker.UnknownEnv, worker.WeightsError))
        raise (BadInput if is_refused else CommandFailed)(str(error)) from error
    except ImportError as error:  # of a library that is there, and cannot be loaded
        raise CommandFailed(str(error)) from error


@contextmanager
def logged_to(display: Display, level: int = logging.WARNING) -> Iterator[None]:
    """Within the block, show log events of at least this level."""
    import structlog

    from cormorant_worker.logs import TAIL

    def show(_logger: object, _method: str, event: MutableMapping[str, Any]) -> Any:
        display.log(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, TAIL, show],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    try:
        yield
    finally:
        structlog.configure(**before)
