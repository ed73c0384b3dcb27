"""Supervisors of pods as processes of this machine: a head and workers, each with a Ray node of its own."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from cormorant_testing.scripts import environment, of_session

TOKEN = "0123456789abcdef0123456789abcdef"
STORE_BYTES = 100 << 20
RAY = {
    "RAY_AUTH_MODE": "token",
    # As in pods: see the operator's entrypoints.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "POD_IP": "127.0.0.1",
    "CORMORANT_RAY_PORTS": "free",
    "CORMORANT_OBJECT_STORE_BYTES": str(STORE_BYTES),
}


def free_port() -> int:
    """A port that is free now, below those that connections take: many tests connect while a head starts."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports between 20,000 and 32,000 are taken")


class Pod:
    """A supervisor and all below it. Its log is read as it comes."""

    def __init__(self, *arguments: str, token: str = TOKEN, **more: str) -> None:
        # Ray puts sockets there, whose paths are short.
        self.folder = tempfile.mkdtemp(prefix="pod-")
        self.lines: list[dict[str, Any]] = []
        self.text = ""
        given = {**RAY, "RAY_AUTH_TOKEN": token, "CORMORANT_RAY_FOLDER": f"{self.folder}/ray", **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cormorant_worker.supervisor", *arguments],
            env=environment(**given), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Pod":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def said(self, event: str) -> list[dict[str, Any]]:
        """Log lines of an event, so far."""
        return [line for line in tuple(self.lines) if line["event"] == event]

    def wait_for(self, event: str, *, times: int = 1, seconds: float = 60) -> dict[str, Any]:
        """The n-th log line of an event."""
        deadline = time.monotonic() + seconds
        while len(found := self.said(event)) < times:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return found[times - 1]

    def get(self, path: str) -> tuple[int, str]:
        """Ask a worker's probes."""
        port = self.wait_for("supervising")["probe_port"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def below(self, title: str) -> list[psutil.Process]:
        """Processes below the supervisor whose command line has this in it."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self) -> list[str]:
        """Processes of the pod that are still there."""
        return [process.name() for process in of_session(self.process.pid)]

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 60) -> int:
        """Send a signal and wait for the exit code; what is left after it is the pod's fault."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """As a node's failure does: everything at once."""
        for process in of_session(self.process.pid):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def worker_pod(gcs_port: int, slot: str = "cpu-0", **more: str) -> Pod:
    """A worker's pod."""
    group, _, index = slot.rpartition("-")
    given = {
        "CORMORANT_HEAD": f"127.0.0.1:{gcs_port}", "CORMORANT_GROUP": group, "CORMORANT_INDEX": index,
        "CORMORANT_GRACE_SECONDS": "30", "CORMORANT_PROBE_PORT": "0",
    }  # fmt: skip
    return Pod("worker", **given | more)


def head_pod(gcs_port: int, *command: str, **more: str) -> Pod:
    """A head's pod; without a command it only keeps Ray."""
    command = command or (sys.executable, "-c", "import time; time.sleep(600)")
    return Pod("head", "--", *command, CORMORANT_GCS_PORT=str(gcs_port), **more)


def tokens_file(folder: Path) -> Path:
    """A token file as the operator's Secret is mounted."""
    path = folder / "tokens.json"
    path.write_text(json.dumps({role: f"{role}-{TOKEN}" for role in ("read", "write", "operator")}))
    path.chmod(0o600)
    return path
