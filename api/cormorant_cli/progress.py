"""How `cormorant run` shows a fleet: a live bar on a terminal, plain lines into a pipe, JSON lines for machines.

Log events of the fleet go to stderr in all three. The main thread calls a display; the fleet's thread also calls `log`,
and a signal handler `close`, possibly a second time.
"""

import contextlib
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from cormorant_cli.printing import RECENT_EPISODES, counted, speaks_json

if TYPE_CHECKING:
    from cormorant_contract.fleet import Stats
    from cormorant_worker.fleet.stats import FleetStats

Event = Mapping[str, object]

_WINDOW_S = 10.0
_MOST_WORKERS = 8
_LOUD = ("warning", "error", "critical")
_SENTENCES = {
    "worker_ready": "worker {worker} is ready after {seconds:.1f} s",
    "pause_granted": "paused by {owner}",
    "pause_ended": "{owner} ended its pause",
}
"""Sentences for the events that users look for."""
_NOT_OF_USERS = re.compile(r'  File "(?:<frozen|[^"]*/(?:cormorant_\w+|\w+-packages|lib/python3[.\d]*)/)')
_NUMBER = re.compile(r"\d+")
_CHAINED = re.compile(r"(\n\n(?:The above exception was|During handling of)[^\n]*\n\n)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    job: str
    env: str
    """The environment, and how many of them a worker steps, as text."""
    workers: int
    replicas: int
    """Workers in the manifest; more than `workers` if this machine has fewer cores."""
    total_frames: int | None
    dataset: str
    """URI; empty when frames go to the queue alone."""
    counts: Literal["frames", "episodes"] = "frames"
    """Unit of the run's counts; an evaluation counts episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    reason: Literal["done", "already_complete", "interrupted"]
    stats: "Stats"
    new_frames: int
    """Frames of this run."""
    seconds: float
    """Seconds from the moment when all workers had started to the end of the last one."""
    fps: float
    """Frames stored in these seconds, per second."""
    dataset: str
    report: str = ""
    """The report's HTML file; empty: there is none."""


class Rate:
    """Frames per second over a sliding window."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now: float, frames: int) -> float:
        """Record a count, and return the rate since the oldest count in the window; 0.0 at first."""
        self._seen.append((now, frames))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return (frames - before) / (now - then) if now > then else 0.0


class JsonDisplay:
    """JSON Lines on stdout; log events as JSON on stderr."""

    interval_s = 1.0
    """Seconds between calls of `progress`."""

    def __init__(self, *, is_verbose: bool = False) -> None:
        self._is_verbose = is_verbose

    def begin(self, plan: RunPlan) -> None:
        _echo_json("started", asdict(plan))

    def serving(self, url: str, *, page: str, token_file: str) -> None:
        """`{"event": "serving", ...}`, without the page's token: programs read the file."""
        _echo_json("serving", {"url": url, "token_file": token_file})

    def progress(self, fleet: "FleetStats", fps: float, waits_for: str = "") -> None:
        """Show a fleet that steps `fps` frames per second, or waits: why, in a sentence."""
        stats, workers = fleet.summary(), [asdict(worker) for worker in fleet.workers]
        rest = {"queued_batches": stats.queued_batches, "workers": workers, "waits_for": waits_for}
        _echo_json("progress", {**_counts(stats, fps), **rest})

    def log(self, event: Event) -> None:
        """Omits tracebacks without user code: the command's last message explains the error."""
        is_ours = event.get("event") == "worker_traceback" and not users_traceback(str(event.get("exception")))
        if self._is_verbose or not is_ours:
            _to_stderr(json.dumps(dict(event), default=str))

    def end(self, summary: Summary) -> None:
        own = {one.name: getattr(summary, one.name) for one in fields(summary) if one.name not in ("stats", "fps")}
        _echo_json("finished", {**_counts(summary.stats, summary.fps), **own})

    def fail(self, message: str, exit_code: int) -> None:
        """Print `{"event": "failed", ...}`, so that programs find the reason in the same stream."""
        _echo_json("failed", {"message": message, "exit_code": exit_code})

    def close(self) -> None: ...


class PlainDisplay:
    """One line every few seconds on stdout, for pipes and files; log events on stderr."""

    interval_s = 3.0

    def __init__(self, *, is_verbose: bool = False) -> None:
        self._last_wait, self._counts = "", "frames"
        self._is_verbose = is_verbose
        self._told: set[object] = set()
        """Warnings shown so far."""

    def begin(self, plan: RunPlan) -> None:
        self._counts = plan.counts
        self._say(_opening(plan))
        self._say(f"{_starting(plan)} ...")

    def serving(self, url: str, *, page: str, token_file: str) -> None:
        """Print the page's URL and commands to copy."""
        self._say(f"live page: {page}")
        self._say(f"REST API: {url}{f'; tokens are in {token_file}' if token_file else ''}")

    def progress(self, fleet: "FleetStats", fps: float, waits_for: str = "") -> None:
        """Print one line; while the job waits, only the first."""
        # Without its seconds, the sentence stays the same while a job waits.
        before, self._last_wait = self._last_wait, _NUMBER.sub("", waits_for)
        stats = fleet.summary()
        amount = _amount(stats, self._counts)
        if waits_for:
            if self._last_wait != before:
                self._say(f"{waits_for} ({amount})")
            return
        trouble = _trouble_of(fleet)
        if trouble and (cause := _NUMBER.sub("", trouble)) not in self._told:
            self._told.add(cause)
            self._say(f"warning: {trouble}")
        self._say(", ".join((amount, f"{fps:,.0f} frames/s", *_details(stats), _workers_line(fleet))))

    def log(self, event: Event) -> None:
        if line := self._line_of(event):
            _to_stderr(line)

    def _line_of(self, event: Event) -> str:
        line = log_line(event, is_verbose=self._is_verbose)
        cause = (event.get("event"), event.get("reason"), event.get("exception"))
        is_again = event.get("level") in _LOUD and cause in self._told
        self._told.add(cause)
        return "" if is_again and not self._is_verbose else line

    def end(self, summary: Summary) -> None:
        self.close()
        for line in summary_lines(summary, self._counts):
            typer.echo(line)

    def fail(self, message: str, exit_code: int) -> None:
        self.close()

    def close(self) -> None: ...

    def _say(self, line: str) -> None:
        typer.echo(line)


class LiveDisplay(PlainDisplay):
    """A bar that stays at the bottom of the terminal; log events and lines scroll above it."""

    interval_s = 0.2

    def __init__(self, console: Console, *, shares_stderr: bool, is_verbose: bool = False) -> None:
        """Draw on a console; `shares_stderr`: stderr is the same terminal."""
        super().__init__(is_verbose=is_verbose)
        self._console = console
        self._shares_stderr = shares_stderr
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(complete_style="green", finished_style="green", pulse_style="green"),  # rich's own is red
            TextColumn("{task.fields[amount]}"),
            TextColumn("[bold cyan]{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=None, amount="", rate="")
        self._live = Live(console=self._console, refresh_per_second=8, transient=True, redirect_stdout=False)

    def begin(self, plan: RunPlan) -> None:
        """Show that workers are starting, which takes seconds."""
        self._counts = plan.counts
        self._bar.update(self._task, description=escape(plan.job), total=plan.total_frames)
        self._say(_opening(plan))
        self._live.start()
        self._live.update(Spinner("dots", text=Text(_starting(plan))))

    def progress(self, fleet: "FleetStats", fps: float, waits_for: str = "") -> None:
        stats = fleet.summary()
        amount = _amount(stats, self._counts)
        self._bar.update(self._task, completed=stats.frames, amount=amount, rate=f"{fps:,.0f} frames/s")
        last = Text(_workers_line(fleet), style="dim", no_wrap=True, overflow="ellipsis")
        if trouble := _trouble_of(fleet) or waits_for:
            last = Text(trouble, style="bold yellow", no_wrap=True, overflow="ellipsis")
        details = Text(" · ".join(_details(stats)), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, details, last))

    def log(self, event: Event) -> None:
        line = self._line_of(event)
        if self._shares_stderr and line:
            with contextlib.suppress(OSError):
                self._say(line, style="yellow" if event.get("level") in _LOUD else "dim")
        else:
            super().log(event)

    def close(self) -> None:
        """Remove the bar and show the cursor."""
        with contextlib.suppress(OSError):
            self._live.stop()
            self._console.show_cursor(True)

    def _say(self, line: str, *, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)


Display = JsonDisplay | PlainDisplay


def choose_display(*, is_verbose: bool = False) -> Display:
    """JSON with --json, a live bar on a terminal, else plain lines."""
    if speaks_json():
        return JsonDisplay(is_verbose=is_verbose)
    if not sys.stdout.isatty():
        return PlainDisplay(is_verbose=is_verbose)
    # The bar and the log share one stream if possible, or they would overwrite each other.
    shares_stderr = sys.stderr.isatty()
    console = Console(stderr=shares_stderr, highlight=False)
    return LiveDisplay(console, shares_stderr=shares_stderr, is_verbose=is_verbose)


def summary_lines(summary: Summary, counts: str = "frames") -> list[str]:
    """The summary at the end, and next steps."""
    stats = summary.stats
    if summary.reason == "already_complete":
        return [
            f"nothing to do: the dataset at {summary.dataset} already has {stats.frames:,} frames",
            f"to collect more, raise totalFrames (now {stats.total_frames or 0:,}) or change output.dataset.uri",
        ]
    verb = "collected" if summary.reason == "done" else "stopped after"
    played = counted(stats.episodes, "episode")
    if stats.mean_return is not None and stats.mean_length is not None:
        last = min(stats.episodes, RECENT_EPISODES)
        played += f"; mean return {stats.mean_return:.2f} and mean length {stats.mean_length:.1f} over the last {last}"
        played += "".join(f"; {metric}" for metric in _metrics(stats))
    rate = (
        f": {summary.fps:,.0f} {counts}/s over {summary.seconds:.1f} s with all workers"
        if summary.fps
        else " before all workers had started"
    )
    lines = [f"{verb} {summary.new_frames:,} {counts}{rate}", played]
    if stats.dropped:
        lines.append(f"dropped frames: {_dropped(stats)}")
    if summary.report:
        lines.append(f"report: {summary.report}")
    if not summary.dataset:
        return [*lines, "frames that no learner took were counted but not kept; add output.dataset to keep everything"]
    if counts == "episodes":
        return [*lines, f"results: {summary.dataset}/evaluation.json"]
    lines.append(f"dataset: {summary.dataset}, {stats.frames:,} frames")
    if summary.reason == "interrupted":
        lines.append("run the same command again to continue")
    else:
        lines.append(f"next: cormorant dataset verify {summary.dataset}")
    return lines


def _counts(stats: "Stats", fps: float) -> dict[str, object]:
    """Fields shared by progress events and the final event."""
    return {
        "frames": stats.frames,
        "total_frames": stats.total_frames,
        "fps": fps,
        "episodes": stats.episodes,
        "mean_return": stats.mean_return,
        "mean_length": stats.mean_length,
        "version": stats.version,
        "restarts": stats.restarts,
        "dropped": dict(stats.dropped),
        "metrics": dict(stats.metric_means),
    }


def _opening(plan: RunPlan) -> str:
    frames = f"{plan.total_frames:,} {plan.counts}" if plan.total_frames else f"{plan.counts} until Ctrl-C"
    target = f" into {plan.dataset}" if plan.dataset else ""
    workers = counted(plan.workers, "worker")
    if plan.workers < plan.replicas:
        all_of = plan.replicas
        workers = f"{plan.workers} of the manifest's {all_of} workers, one per core (--workers {all_of} starts all)"
    return f"{plan.job}: {frames} of {plan.env}; {workers}{target}"


def _starting(plan: RunPlan) -> str:
    return f"starting {counted(plan.workers, 'worker')}: importing PyTorch and the environments takes 5 to 30 s"


def _amount(stats: "Stats", counts: str) -> str:
    if stats.total_frames is None:
        return f"{stats.frames:,} {counts}"
    share = stats.frames / stats.total_frames
    return f"{stats.frames:,} of {stats.total_frames:,} {counts} ({min(share, 1.0):.0%})"


def _details(stats: "Stats") -> Iterator[str]:
    yield counted(stats.episodes, "episode")
    if stats.mean_return is not None and stats.mean_length is not None:
        yield f"return {stats.mean_return:.2f}"
        yield f"length {stats.mean_length:.1f}"
        yield from _metrics(stats)
    yield f"policy version {stats.version}"
    if stats.dropped:
        yield f"dropped {_dropped(stats)}"


def _metrics(stats: "Stats") -> Iterator[str]:
    return (f"{name} {value:.3g}" for name, value in stats.metric_means.items() if value is not None)


def _dropped(stats: "Stats") -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in sorted(stats.dropped.items()))


def _trouble_of(fleet: "FleetStats") -> str:
    return fleet.env_failures.partition("\n")[0]


def _workers_line(fleet: "FleetStats") -> str:
    shown = [f"{worker.name} {worker.phase}" for worker in fleet.workers[:_MOST_WORKERS]]
    if len(fleet.workers) > _MOST_WORKERS:
        shown.append(f"and {len(fleet.workers) - _MOST_WORKERS} more")
    shown += [f"{fleet.restarts} restarted"] if fleet.restarts else []
    env_restarts = sum(worker.env_restarts for worker in fleet.workers)
    shown += [f"{counted(env_restarts, 'environment')} restarted"] if env_restarts else []
    return "workers: " + ", ".join(shown)


def log_line(event: Event, *, is_verbose: bool = False) -> str:
    """A log event as text: warnings as sentences, others only if requested; empty: nothing to show."""
    fields = {key: value for key, value in event.items() if key not in ("event", "level", "exception")}
    kind, trace = str(event.get("event", "")), str(event.get("exception") or "")
    is_loud = event.get("level") in _LOUD
    if not is_verbose:
        if kind in _SENTENCES:
            return _SENTENCES[kind].format(**fields)
        if kind == "worker_traceback":
            return users_traceback(trace)  # the command's last message explains the error
        if not is_loud:
            return ""
        kind, trace = kind.replace("_", " "), users_traceback(trace) or trace
        parts = [event["level"], fields.pop("worker", ""), kind, fields.pop("reason", "")]
        rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in fields.items())
        line = ": ".join(str(part) for part in parts if part) + (f" ({rest})" if rest else "")
    else:
        line = " ".join([f"{event['level']}: {kind}" if is_loud else kind, *(f"{k}={v}" for k, v in fields.items())])
    return f"{line}\n{trace}" if trace else line


def users_traceback(text: str) -> str:
    """A worker's traceback from the first line in the user's code to the error; empty without user code. Of chained
    exceptions, those that the user's code raised.
    """
    shown, parts = "", _CHAINED.split(text)
    for link, part in zip(("", *parts[1::2]), parts[::2], strict=True):
        header, *frames = re.split(r"^(?=  File )", part, flags=re.MULTILINE)
        own = next((i for i, frame in enumerate(frames) if not _NOT_OF_USERS.match(frame)), None)
        if own is not None:
            shown += "".join([link if shown else "", header, *frames[own:]]).rstrip()
    return shown


def _to_stderr(line: str) -> None:
    # A closed log stream must not end the fleet's thread.
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line, err=True)


def _echo_json(event: str, fields: dict[str, object]) -> None:
    typer.echo(json.dumps({"event": event, **fields}))
