"""A real Prometheus, as a process of this machine."""

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cormorant_testing.needs import lacks
from cormorant_testing.scripts import unused_port

START_S = 60


def skip_without_prometheus() -> None:
    """Skip the test where there is no Prometheus to start."""
    if shutil.which("prometheus") is None:
        lacks("prometheus", "no prometheus on the PATH: nothing is scraped (Debian: apt-get install prometheus)")


class Prometheus:
    """One Prometheus; skips the test where there is none."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Mapping[str, str]],
        *,
        found: Sequence[Mapping[str, Any]] = (),
        interval: str = "1s",
        rules: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: for its data and what it says.
            targets: addresses, and labels of each as a discovery in a cluster would add them.
            found: scrape configurations of targets that it finds itself.
            interval: between two scrapes.
            rules: a rule file.
        """
        skip_without_prometheus()
        scraped = [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()]
        config: dict[str, Any] = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "cormorant", "static_configs": scraped}, *found],
        }
        if rules is not None:
            config["rule_files"] = [str(rules)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = unused_port()
        self._log = (folder / "prometheus.log").open("w+")
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}", "--query.lookback-delta=30s",
            ],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> "Prometheus":
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            assert self.process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        self._log.close()

    def query(self, expr: str, *, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        """Numbers by labels."""
        data = self._ask({"query": expr} | ({"time": str(at)} if at is not None else {}))
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in data["result"]}

    def times(self, series: str, *, began: float, ended: float) -> list[float]:
        """When samples of the one series that is meant were taken."""
        (row,) = self._ask({"query": f"{series}[{(ended - began) * 1000:.0f}ms]", "time": str(ended)})["result"]
        return [float(at) for at, _ in row["values"]]

    def numbers(self, expr: str) -> list[float]:
        """Values that are numbers."""
        return [value for value in self.query(expr).values() if not math.isnan(value)]

    def wait_for(self, expr: str, *, seconds: float = 60) -> list[float]:
        """Until an expression gives numbers."""
        deadline = time.monotonic() + seconds
        while not (found := self.numbers(expr)):
            assert time.monotonic() < deadline, f"{expr} gives nothing after {seconds} s; {self._said()}"
            time.sleep(0.2)
        return found

    def _ask(self, asked: dict[str, str]) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{asked['query']}: {error.read().decode()}") from error

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _said(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-2000:]
