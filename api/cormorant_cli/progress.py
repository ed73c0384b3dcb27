"""How `cormorant run` shows a fleet: a live bar on a terminal, plain lines into a pipe, JSON lines for machines.

Plain data in, text out; `run.py` fills the data from the fleet. Log events of the fleet go to stderr in all three. The
main thread calls a display, the fleet's thread `log` as well, and a signal handler `close`, maybe for the second time.
"""

import contextlib
import json
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cormorant_cli.printing import RECENT_EPISODES, counted, size_of

Event = Mapping[str, object]

_WINDOW_S = 10.0
_MOST_WORKERS = 8
_BAR_WIDTH = 40
_HOUR_S, _MINUTE_S = 3600, 60
_LOUD = ("warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    job: str
    env: str
    """The environment and how many of it a worker steps, for people."""
    workers: int
    replicas: int
    """Workers that the manifest asks for; more than `workers` where this machine has fewer cores."""
    total_frames: int | None
    dataset: str
    """URI; empty when frames go to the queue alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    name: str
    phase: str
    attempt: int
    frames: int
    version: int
    env_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    frames: int
    """Frames that count: accepted by the output, those of earlier runs of the dataset among them."""
    total_frames: int | None
    fps: float
    """Frames stepped per second: over the last ten seconds, at the end over the whole run."""
    episodes: int
    mean_return: float | None
    """Over the last episodes, 100 at most; None before the first has ended."""
    mean_length: float | None
    version: int
    restarts: int
    dropped: Mapping[str, int]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Means of the manifest's episodeMetrics over the same episodes, by name; None: no number among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Counts):
    queued_batches: int
    workers: tuple[WorkerView, ...]
    waits_for: str = ""
    """Why nothing is collected at the moment, in a sentence; empty while frames come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Where a head is served, for people and programs on this machine."""

    url: str
    page: str
    """Address of the live page; its fragment is a token, which browsers do not send."""
    token_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Counts):
    reason: Literal["done", "already_complete", "interrupted"]
    new_frames: int
    """Those of this run."""
    seconds: float
    """From the first ticket to the end of the last worker."""
    dataset: str
    dataset_bytes: int | None
    """Size of the dataset's shards; None without a dataset."""
    was_served: bool = False
    """Batches went to consumers over HTTP."""


class Rate:
    """Frames per second over a sliding window."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now: float, frames: int) -> float:
        """Note a count and return the rate since the oldest one within the window; 0.0 at first."""
        self._seen.append((now, frames))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        then, before = self._seen[0]
        return (frames - before) / (now - then) if now > then else 0.0


class JsonDisplay:
    """One JSON object a line on stdout; log events as JSON on stderr."""

    interval_s = 1.0
    """Seconds between two calls of `progress` that are worth making."""

    def begin(self, plan: RunPlan) -> None:
        _echo_json("started", asdict(plan))

    def serving(self, serving: Serving) -> None:
        """`{"event": "serving", ...}`, without the token: programs read the file."""
        _echo_json("serving", {"url": serving.url, "token_file": serving.token_file})

    def progress(self, snapshot: Snapshot) -> None:
        _echo_json("progress", asdict(snapshot))

    def log(self, event: Event) -> None:
        _to_stderr(json.dumps(dict(event), default=str))

    def end(self, summary: Summary) -> None:
        _echo_json("finished", asdict(summary))

    def fail(self, message: str, exit_code: int) -> None:
        """`{"event": "failed", ...}`: machines read the reason where they read the rest."""
        _echo_json("failed", {"message": message, "exit_code": exit_code})

    def close(self) -> None: ...


class PlainDisplay:
    """A line every few seconds on stdout, for pipes and files; log events on stderr."""

    interval_s = 3.0

    def __init__(self) -> None:
        self._last_wait = ""

    def begin(self, plan: RunPlan) -> None:
        typer.echo(_opening(plan))
        typer.echo(f"{_starting(plan)} ...")

    def serving(self, serving: Serving) -> None:
        for line in _serving_lines(serving):
            typer.echo(line)

    def progress(self, snapshot: Snapshot) -> None:
        """One line; while the job waits, one line in all."""
        # The sentence without its seconds: what stays the same while a job waits.
        sentence = snapshot.waits_for
        wait = sentence.partition(":")[0] + ("" if "yet" in sentence else "again") if sentence else ""
        if wait and wait == self._last_wait:
            return
        self._last_wait = wait
        if wait:
            typer.echo(f"{snapshot.waits_for} ({_amount(snapshot)})")
            return
        parts = (_amount(snapshot), f"{snapshot.fps:,.0f} frames/s", *_details(snapshot), _workers_line(snapshot))
        typer.echo(", ".join(parts))

    def log(self, event: Event) -> None:
        _to_stderr(_log_line(event))

    def end(self, summary: Summary) -> None:
        for line in summary_lines(summary):
            typer.echo(line)

    def fail(self, message: str, exit_code: int) -> None: ...

    def close(self) -> None: ...


class LiveDisplay:
    """A bar that stays at the bottom of the terminal; log events scroll above it."""

    interval_s = 0.2

    def __init__(self, console: Console, *, shares_stderr: bool) -> None:
        """Draw on a console; `shares_stderr` says that what goes to stderr lands there too."""
        self._console = console
        self._shares_stderr = shares_stderr
        self._job = ""
        self._live = Live(console=self._console, refresh_per_second=8, transient=True, redirect_stdout=False)

    def begin(self, plan: RunPlan) -> None:
        """Show that workers are starting, which takes seconds."""
        self._job = plan.job
        self._console.print(Text(_opening(plan)))
        self._live.start()
        self._live.update(Spinner("dots", text=Text(_starting(plan))))

    def serving(self, serving: Serving) -> None:
        """Lines that stay above the bar, to click and to copy."""
        for line in _serving_lines(serving):
            self._console.print(Text(line), soft_wrap=True)

    def progress(self, snapshot: Snapshot) -> None:
        top = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=snapshot.total_frames or 1,
            completed=min(snapshot.frames, snapshot.total_frames or 1),
            width=min(_BAR_WIDTH, max(8, self._console.width // 4)),
            pulse=snapshot.total_frames is None,
        )
        top.add_row(
            Text(self._job, style="bold", no_wrap=True),
            bar,
            Text(_amount(snapshot), no_wrap=True),
            Text(f"{snapshot.fps:,.0f} frames/s", style="bold cyan", no_wrap=True),
            Text(_time_left(snapshot), style="dim", no_wrap=True),
        )
        shown = Group(
            top,
            Text(" · ".join(_details(snapshot)), no_wrap=True, overflow="ellipsis"),
            Text(snapshot.waits_for, style="bold yellow", no_wrap=True, overflow="ellipsis")
            if snapshot.waits_for
            else Text(_workers_line(snapshot), style="dim", no_wrap=True, overflow="ellipsis"),
        )
        self._live.update(shown)

    def log(self, event: Event) -> None:
        if not self._shares_stderr:
            _to_stderr(_log_line(event))
            return
        style = "yellow" if event.get("level") in _LOUD else "dim"
        with contextlib.suppress(OSError):
            self._console.print(Text(_log_line(event), style=style), soft_wrap=True)

    def end(self, summary: Summary) -> None:
        """A few lines instead of the bar."""
        self.close()
        for line in summary_lines(summary):
            typer.echo(line)

    def fail(self, message: str, exit_code: int) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away and show the cursor."""
        with contextlib.suppress(OSError):
            self._live.stop()
            self._console.show_cursor(True)


Display = JsonDisplay | PlainDisplay | LiveDisplay


def choose_display(*, as_json: bool) -> Display:
    """JSON when asked for, a live bar on a terminal, else plain lines."""
    if as_json:
        return JsonDisplay()
    if not sys.stdout.isatty():
        return PlainDisplay()
    # The bar and the log share one stream where they can, or one would overwrite the other.
    shares_stderr = sys.stderr.isatty()
    return LiveDisplay(Console(stderr=shares_stderr, highlight=False), shares_stderr=shares_stderr)


def summary_lines(summary: Summary) -> list[str]:
    """What a person wants to know at the end, and what to do next."""
    if summary.reason == "already_complete":
        return [
            f"nothing to do: the dataset at {summary.dataset} already has {summary.frames:,} frames",
            f"to collect more, raise totalFrames (now {summary.total_frames or 0:,}) or change output.dataset.uri",
        ]
    verb = "collected" if summary.reason == "done" else "stopped after"
    played = counted(summary.episodes, "episode")
    if summary.mean_return is not None and summary.mean_length is not None:
        last = min(summary.episodes, RECENT_EPISODES)
        played += (
            f"; mean return {summary.mean_return:.2f} and mean length {summary.mean_length:.1f} over the last {last}"
        )
        played += "".join(f"; {name} {value:.3g}" for name, value in summary.metrics.items() if value is not None)
    rate = (
        f" in {summary.seconds:.1f} s: {summary.fps:,.0f} frames/s"
        if summary.fps
        else " while the last workers started"
    )
    lines = [f"{verb} {summary.new_frames:,} frames{rate}", played]
    if summary.dropped:
        lines.append(f"dropped frames: {_counts(summary.dropped)}")
    if not summary.dataset and summary.was_served:
        return [*lines, "batches that no consumer acknowledged were not kept; add output.dataset to keep everything"]
    if not summary.dataset:
        return [*lines, "the frames were counted but not kept; add output.dataset, or read them with open_fleet()"]
    size = size_of(summary.dataset_bytes or 0)
    lines.append(f"dataset: {summary.dataset}, {summary.frames:,} frames, {size}")
    if summary.reason == "interrupted":
        lines.append("run the same command again to continue")
    else:
        lines.append(f"next: cormorant dataset verify {summary.dataset}")
    return lines


def _opening(plan: RunPlan) -> str:
    frames = f"{plan.total_frames:,} frames" if plan.total_frames else "frames until Ctrl-C"
    target = f" into {plan.dataset}" if plan.dataset else ""
    workers = counted(plan.workers, "worker")
    if plan.workers < plan.replicas:
        all_of = plan.replicas
        workers = f"{plan.workers} of the manifest's {all_of} workers, one per core (--workers {all_of} starts all)"
    return f"{plan.job}: {frames} of {plan.env}; {workers}{target}"


def _serving_lines(serving: Serving) -> list[str]:
    tokens = f"; tokens are in {serving.token_file}" if serving.token_file else ""
    return [f"live page: {serving.page}", f"REST API: {serving.url}{tokens}"]


def _starting(plan: RunPlan) -> str:
    return f"starting {counted(plan.workers, 'worker')}: importing PyTorch and the environments takes 5 to 30 s"


def _amount(snapshot: Snapshot) -> str:
    if snapshot.total_frames is None:
        return f"{snapshot.frames:,} frames"
    share = snapshot.frames / snapshot.total_frames
    return f"{snapshot.frames:,} of {snapshot.total_frames:,} frames ({min(share, 1.0):.0%})"


def _details(snapshot: Snapshot) -> list[str]:
    parts = [counted(snapshot.episodes, "episode")]
    if snapshot.mean_return is not None and snapshot.mean_length is not None:
        parts += [f"return {snapshot.mean_return:.2f}", f"length {snapshot.mean_length:.1f}"]
        parts += [f"{name} {value:.3g}" for name, value in snapshot.metrics.items() if value is not None]
    parts.append(f"policy version {snapshot.version}")
    if snapshot.dropped:
        parts.append(f"dropped {_counts(snapshot.dropped)}")
    return parts


def _workers_line(snapshot: Snapshot) -> str:
    shown = [f"{worker.name} {worker.phase}" for worker in snapshot.workers[:_MOST_WORKERS]]
    if len(snapshot.workers) > _MOST_WORKERS:
        shown.append(f"and {len(snapshot.workers) - _MOST_WORKERS} more")
    restarts = [f"{snapshot.restarts} restarted"] if snapshot.restarts else []
    env_restarts = sum(worker.env_restarts for worker in snapshot.workers)
    restarts += [f"{counted(env_restarts, 'environment')} restarted"] if env_restarts else []
    return "workers: " + ", ".join([*shown, *restarts])


def _time_left(snapshot: Snapshot) -> str:
    if snapshot.total_frames is None or snapshot.fps <= 0:
        return ""
    seconds = max(0, snapshot.total_frames - snapshot.frames) / snapshot.fps
    hours, rest = divmod(int(seconds), _HOUR_S)
    minutes, rest = divmod(rest, _MINUTE_S)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


def _counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in sorted(dropped.items()))


def _log_line(event: Event) -> str:
    fields = {key: value for key, value in event.items() if key not in ("event", "level", "exception")}
    level = f"{event['level']}: " if event.get("level") in _LOUD else ""
    line = f"{level}{event.get('event', '')} " + " ".join(f"{key}={value}" for key, value in fields.items())
    return f"{line.rstrip()}\n{event['exception']}" if event.get("exception") else line.rstrip()


def _to_stderr(line: str) -> None:
    # The fleet's thread must not end because its log has no reader any more.
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line, err=True)


def _echo_json(event: str, fields: dict[str, object]) -> None:
    typer.echo(json.dumps({"event": event, **fields}))
