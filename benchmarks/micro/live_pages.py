"""What open pages cost a job that uses every processor: windows with 50 of them and without, in turn.

Two figures, since one alone misleads. *Processor time*: what the head's process takes more while pages are open, over
what the collection (the head and its workers) takes without them. Browsers are elsewhere, so theirs is not the job's:
this is what pages take from it, and it says so on a busy machine too. *Frames per second*: with pages over
without, as a learner that waits for frames sees it. The pages' own process competes for the processors here, which the
note tells, and whatever else the machine does is in it: trust it on a quiet machine only.

The job is the hardest case that is not a toy: small observations, a network, a batch every few milliseconds from each
of as many workers as there are processors. There is no consumer: the oldest batches are dropped.
"""

import json
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil

from benchmarks.micro import heads, rows
from benchmarks.workloads import num_cores

PAGES = 50
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened in one: processor seconds, and counts."""

    seconds: float
    frames: float
    head_s: float
    fleet_s: float
    pages_s: float
    moments: float
    """Heard by all pages together."""
    size_bytes: float
    """Sent to all pages together."""

    @property
    def frames_per_second(self) -> float:
        return self.frames / self.seconds


class Pages:
    """The process that plays pages."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self._process = heads.start(stack, ["-m", "benchmarks.micro.open_pages", url], stdin=subprocess.PIPE)
        stack.callback(self._process.stdin.close)
        self.pid = self._process.pid

    def tell(self, command: str) -> dict:
        """Returns what all pages have heard so far."""
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"pages did not {command} within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the pages' process ended with {self._process.wait(10)}")
        return json.loads(line)


def measure(*, quick: bool) -> Sequence[dict]:
    rounds, seconds = (2, 4.0) if quick else (12, 6.0)
    job = heads.make_job("CartPole-v1", 64, 64 * 64, policy="mlp", queue=4)
    job["spec"]["output"]["queue"]["onFull"] = "drop_oldest"
    with heads.running(job, workers=num_cores()) as head, ExitStack() as stack:
        pages = Pages(stack, head.client.url)
        _ = _window(head, pages, seconds)
        without, watched, opening_ms = [], [], []
        for _ in range(rounds):
            without.append(_window(head, pages, seconds))
            opening_ms.append(_open(head, pages, without[-1].head_s / without[-1].seconds))
            watched.append(_window(head, pages, seconds))
            pages.tell("close")
            time.sleep(0.5)
    return _rows(without, watched, opening_ms)


def _rows(without: Sequence[Window], watched: Sequence[Window], opening_ms: Sequence[float]) -> list[dict]:
    heard = median(window.moments / window.seconds / PAGES for window in watched)
    if not 0.5 <= heard <= 1.5:
        raise RuntimeError(f"a page heard {heard:.2f} moments a second, not one: there is nothing to compare")
    more, error = _pages_share(without, watched)
    head = median(window.head_s / window.seconds for window in without)
    collecting = median((window.head_s + window.fleet_s) / window.seconds for window in without)
    frames = median(b.frames_per_second / a.frames_per_second for a, b in zip(without, watched, strict=True))
    per_second = median(window.frames_per_second for window in without)
    theirs = median(window.pages_s / window.seconds for window in watched)
    size = median(window.size_bytes / window.seconds for window in watched) / PAGES
    return [
        rows.row(
            f"processor time of {PAGES} pages, over the collection's", more / collecting, "x", bar="<= 0.01",
            note=f"{more:.4f} (+- {error:.4f}) of a processor; without pages the head takes {head:.3f}, with its "
            f"workers {collecting:.2f}",
        ),
        rows.row(
            f"frames per second with {PAGES} pages over none", frames, "x", bar=">= 0.99",
            note=f"{per_second:,.0f}; the pages' own process takes {theirs:.4f} of a processor",
        ),
        rows.row(
            "processor time of the head, one page opens", median(opening_ms), "ms",
            note=f"then {size / 1e3:.1f} kB a second",
        ),
    ]  # fmt: skip


def _pages_share(without: Sequence[Window], watched: Sequence[Window]) -> tuple[float, float]:
    """What pages take of a processor in the head, and the standard error.

    The head's time is a share of the clock's, something for each frame, and the pages: least squares tell them apart,
    since frames per second are never the same in two windows.
    """
    windows = [*((window, 0.0) for window in without), *((window, 1.0) for window in watched)]
    causes = np.array([[w.seconds, w.frames / 1e6, w.seconds * is_watched] for w, is_watched in windows])
    spent = np.array([window.head_s for window, _ in windows])
    found, *_ = np.linalg.lstsq(causes, spent, rcond=None)
    variance = float(np.sum((spent - causes @ found) ** 2)) / max(1, len(windows) - len(found))
    return float(found[2]), float(np.sqrt(variance * np.linalg.pinv(causes.T @ causes)[2, 2]))


def _window(head: heads.RunningHead, pages: Pages, seconds: float) -> Window:
    process = psutil.Process(head.pid)
    watchers = psutil.Process(pages.pid)
    workers = process.children(recursive=True)

    def now() -> tuple[float, ...]:
        heard = pages.tell("hear")
        frames = head.client.status().frames.stepped
        spent = (_cpu_s(process), sum(map(_cpu_s, workers)), _cpu_s(watchers))
        return (time.perf_counter(), frames, *spent, heard["moments"], heard["bytes"])

    before = now()
    time.sleep(seconds)
    passed, frames, own, fleet_s, pages_s, moments, size = (b - a for a, b in zip(before, now(), strict=True))
    return Window(
        seconds=passed, frames=frames, head_s=own, fleet_s=fleet_s, pages_s=pages_s, moments=moments, size_bytes=size
    )


def _open(head: heads.RunningHead, pages: Pages, usual_share: float) -> float:
    """Milliseconds of the head that one page takes until it has heard a moment, above what the head takes anyway."""
    process = psutil.Process(head.pid)
    before, start = _cpu_s(process), time.perf_counter()
    pages.tell(f"open {PAGES}")
    seconds = time.perf_counter() - start
    return 1e3 * (_cpu_s(process) - before - usual_share * seconds) / PAGES


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    rows.main(measure)
