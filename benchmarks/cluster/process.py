"""The operator and the heads as processes: started, asked, weighed, stopped."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

STOP_S = 30.0
_METRIC = re.compile(r"^cormorant_operator_(?P<name>\w+?)(?P<labels>\{[^}]*\})? (?P<value>[0-9.e+-]+)$", re.MULTILINE)


@contextmanager
def stub_heads() -> Iterator[int]:
    """Heads, in a process of their own. Gives their port."""
    command = [sys.executable, "-m", "benchmarks.cluster.head_stub"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


def move_heads(port: int, *, rate: float) -> None:
    """Rate of all frame counts; 0 stops them."""
    body = json.dumps({"rate": rate}).encode()
    with urlopen(Request(f"http://127.0.0.1:{port}/frames-per-second", data=body), timeout=10):
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What every head counts at one moment."""

    frames: int
    per_second: float

    def age_s(self, frames: int) -> float:
        """How old a count is."""
        return (self.frames - frames) / self.per_second


def frames_now(port: int) -> Counted:
    """What every head counts now."""
    with urlopen(f"http://127.0.0.1:{port}/frames", timeout=10) as answer:
        told = json.load(answer)
    return Counted(frames=int(told["frames"]), per_second=float(told["rate"]))


def heads_asked(port: int) -> int:
    """Heads that were asked since this was called last."""
    with urlopen(f"http://127.0.0.1:{port}/asked", timeout=10) as answer:
        return int(json.load(answer)["heads"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a while cost the operator."""

    percent_of_a_core: float
    highest_rss_mb: float


class Operator:
    """One operator process that looks after one namespace. Use as a context manager."""

    def __init__(self, *, namespace: str, head_url: str, folder: Path) -> None:
        key, self.log = folder / "key", folder / "operator.log"
        key.write_text("0123456789abcdef" * 4)
        self._probe_port = _free_port()
        self._command = [
            *(sys.executable, "-m", "cormorant_operator", "--image", "example/cormorant:1", "--key-file", str(key)),
            *("--namespace", namespace, "--probe-port", str(self._probe_port), "--head-url", head_url),
        ]
        self._more: tuple[str, ...] = ()

    def __enter__(self) -> "Operator":
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*self._command, *self._more], stdout=log, stderr=subprocess.STDOUT)
        self._stats = psutil.Process(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_S)
        self._process.kill()
        self._process.wait(timeout=STOP_S)

    def restart(self, *more: str) -> None:
        """Kill it, and start another, with other arguments besides."""
        self._more = more
        self._process.kill()
        self._process.wait(timeout=STOP_S)
        self.__enter__()

    @property
    def cpu_s(self) -> float:
        """CPU time that it has used."""
        times = self._stats.cpu_times()
        return float(times.user + times.system)

    def weigh(self, seconds: float) -> Load:
        """Look on for a while."""
        began, used_s, highest = time.monotonic(), self.cpu_s, 0
        while time.monotonic() - began < seconds:
            self.check()
            highest = max(highest, self._stats.memory_info().rss)
            time.sleep(min(1.0, seconds / 10))
        share = (self.cpu_s - used_s) / (time.monotonic() - began)
        return Load(percent_of_a_core=100 * share, highest_rss_mb=highest / 1e6)

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a metric of its own, of the samples with a label; 0 while it does not answer."""
        self.check()
        try:
            with urlopen(f"http://127.0.0.1:{self._probe_port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except (URLError, OSError):
            return 0.0
        found = [sample for sample in _METRIC.finditer(text) if sample["name"] == name]
        return sum(float(sample["value"]) for sample in found if label in (sample["labels"] or ""))

    def is_ready(self) -> bool:
        """Whether it has listed everything."""
        self.check()
        with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{self._probe_port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def check(self) -> None:
        """Raises when it has ended."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"the operator ended with {code}: {self.log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
