"""Runs contenders as processes and asks them in turn: A B C A B C ... (protocol.py has the other end)."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.contenders import ROOT, Contender

READY_S = 300.0
IDLE_S = 30.0
"""For a contender to finish what it collects ahead."""
_IDLE_SHARE = 0.1
_IDLE_WINDOW_S = 0.25
REPLY_S = 120.0
CLOSE_S = 15.0

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class ContenderFailed(Exception):
    """A contender ended, said nothing in time, or could not be started; the message has its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement."""

    frames: int
    seconds: float
    cpu_seconds: float
    """User and system time of the contender and its workers."""

    @property
    def frames_per_second(self) -> float:
        return self.frames / self.seconds


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Everything one contender did in one workload: a sample a round, or why there is none."""

    samples: list[Sample] = field(default_factory=list)
    failure: str = ""


def environment() -> dict[str, str]:
    """One thread for every numeric library; this folder importable."""
    # The peers' interpreter has no install of this project: its packages are found by their folders.
    folders = (str(ROOT), str(ROOT / "api"), str(ROOT / "worker"))
    path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class Process:
    """A contender's process, in a session of its own so that its workers end with it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise ContenderFailed(f"cannot start {command[0]}: {error}") from error
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self) -> None:
        self.reply("ready", timeout_s=READY_S)

    def measure(self, seconds: float) -> Sample:
        try:
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ContenderFailed(f"it ended between two measurements: {self._last_words()}") from error
        reply = self.reply("frames", timeout_s=REPLY_S + 10 * seconds)
        return Sample(frames=int(reply["frames"]), seconds=reply["seconds"], cpu_seconds=reply["cpu_seconds"])

    def wait_until_idle(self) -> None:
        """Wait until this contender and all its workers rest: what they collect ahead must not fall into the next
        one's measurement. One that never rests is left as it is after `IDLE_S`.
        """
        deadline = time.monotonic() + IDLE_S
        before = self._cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(_IDLE_WINDOW_S)
            now = self._cpu_seconds()
            if now - before < _IDLE_SHARE * _IDLE_WINDOW_S:
                return
            before = now

    def _cpu_seconds(self) -> float:
        """Processor time of the whole tree so far."""
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def reply(self, key: str, *, timeout_s: float) -> dict:
        """The next JSON line that has `key`; other output of the libraries is passed over."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise ContenderFailed(f"no answer within {timeout_s:.0f} s: {self._last_words()}") from None
            if line is None:
                raise ContenderFailed(f"it ended early: {self._last_words()}")
            if line.startswith("{"):
                message = json.loads(line)
                if "unavailable" in message:
                    raise ContenderFailed(message["unavailable"])
                if key in message:
                    return message

    def close(self) -> None:
        """Ask it to end, then end its whole session."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(CLOSE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(CLOSE_S)
        self._stderr.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "nothing on stderr"


@contextmanager
def running(
    contenders: Sequence[Contender], workload: str, outcomes: dict[str, Outcome], say: Callable[[str], None]
) -> Iterator[dict[str, Process]]:
    """Start everybody and wait until all are warm. Those that start alone come after the others are idle."""
    processes: dict[str, Process] = {}

    def settle(group: Sequence[Contender]) -> None:
        for contender in group:
            say(f"{workload}: starting {contender.name}")
            with failures_into(outcomes[contender.name]):
                processes[contender.name] = Process(contender.command(workload))
                stack.callback(processes[contender.name].close)
        for contender in group:
            if contender.name in processes:
                with failures_into(outcomes[contender.name]):
                    processes[contender.name].wait_until_ready()

    with ExitStack() as stack:
        settle([contender for contender in contenders if not contender.starts_alone])
        for contender in contenders:
            if contender.starts_alone:
                settle([contender])
        yield processes


@contextmanager
def failures_into(outcome: Outcome) -> Iterator[None]:
    """A contender that fails loses its row; the others go on."""
    try:
        yield
    except ContenderFailed as failure:
        outcome.failure = str(failure)


def run_workload(
    contenders: Sequence[Contender], workload: str, *, rounds: int, seconds: float, say: Callable[[str], None]
) -> dict[str, Outcome]:
    """Measure every contender once a round, `rounds` times, in the order given."""
    outcomes = {contender.name: Outcome() for contender in contenders}
    with running(contenders, workload, outcomes, say) as processes:
        for number in range(rounds):
            for name, process in processes.items():
                if outcomes[name].failure:
                    continue
                say(f"{workload}: round {number + 1} of {rounds}, {name}")
                with failures_into(outcomes[name]):
                    outcomes[name].samples.append(process.measure(seconds))
                process.wait_until_idle()
    return outcomes
