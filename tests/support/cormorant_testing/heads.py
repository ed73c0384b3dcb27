"""`python -m cormorant_api` in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from cormorant_testing.serving import Api

START_S = 120


def write_manifest(folder: Path, task: str, **collection: Any) -> Path:
    """A job of an EnvPool task that needs no consumer, as a file."""
    document = {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": task.partition("-")[0].lower(), "namespace": "team-a"},
        "spec": {
            "env": {"envpool": {"taskId": task, "numEnvs": 4, "numThreads": 1}},
            "policy": {
                "entrypoint": f"cormorant_worker.policies:{'mlp' if task.startswith('CartPole') else 'atari_cnn'}"
            },
            "collection": {"framesPerBatch": 64, "seed": 7, **collection},
            "output": {"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
            "replicas": 2,
        },
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class HeadProcess:
    """One head. Its log is read as it comes, so that it never waits for a reader."""

    def __init__(
        self, manifest: Path, directory: Path, *options: str, module: Sequence[str] = ("cormorant_api",)
    ) -> None:
        self.directory = directory
        self.lines: list[dict[str, Any]] = []
        self.text = ""
        support = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", *module, "--job", str(manifest), "--port", "0",
                "--directory", str(directory), "--workers", "1", "--linger-seconds", "0.5", *options,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "HeadProcess":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def wait_for(self, event: str, *, timeout_s: float = START_S) -> dict[str, Any]:
        """The first log line of an event."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = next((line for line in self.lines if line["event"] == event), None)
            if found is not None:
                return found
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def api(self, role: str = "operator") -> Api:
        """Waits until it is ready."""
        ready = self.wait_for("head_ready")
        tokens = json.loads(Path(ready["token_file"]).read_text())
        return Api(int(ready["url"].rpartition(":")[2]), tokens[role])

    def kill(self) -> None:
        """kill -9, and wait until its workers have noticed."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=START_S)
        assert alive == [], "workers outlive their head"
        self._close()

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 60) -> int:
        """Send a signal and wait for the exit code."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(children, timeout=START_S)
        assert alive == [], "workers outlive their head"
        self._close()
        return code

    def _close(self) -> None:
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
