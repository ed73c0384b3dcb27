"""A head in a process of its own, for micro-benchmarks that need one."""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import ROOT
from benchmarks.ours import ENTRYPOINTS
from cormorant_client import Client, connect

START_S = 120.0


@dataclass(frozen=True, slots=True)
class RunningHead:
    """A head that is ready, without tokens."""

    client: Client
    pid: int


def make_job(
    task: str, num_envs: int, frames_per_batch: int, *, policy: str | None, queue: int, kwargs: dict | None = None
) -> dict:
    chosen = {"random": {}} if policy is None else {"entrypoint": ENTRYPOINTS[policy], "kwargs": kwargs or {}}
    return {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "bench"},
        "spec": {
            "env": {"envpool": {"taskId": task, "numEnvs": num_envs, "numThreads": 1}},
            "policy": chosen,
            "collection": {"mode": "async", "framesPerBatch": frames_per_batch, "seed": 7},
            "output": {"queue": {"capacityBatches": queue}},
            "workerGroups": [{"name": "cpu", "minReplicas": 1, "maxReplicas": 8}],
        },
    }


@contextmanager
def running(document: dict, *, workers: int) -> Iterator[RunningHead]:
    """A head and its local fleet."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        manifest = Path(folder) / "job.yaml"
        manifest.write_text(json.dumps(document))
        options = ["--job", str(manifest), "--workers", str(workers), "--no-tokens", "--port", "0"]
        process = start(stack, ["-m", "cormorant_api", *options])
        client = stack.enter_context(connect(announced(process, "head_ready")))
        # A reader of the log, or its pipe fills up.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield RunningHead(client, process.pid)


def start(stack: ExitStack, arguments: Sequence[str], *, stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
    """Python in a process that ends with the stack."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=dict(os.environ),
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def stop() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()

    stack.callback(stop)
    return process


def announced(process: subprocess.Popen, event: str) -> str:
    """The URL in the JSON line that says that a server is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], 1.0)
        line = process.stdout.readline() if readable else b""
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}: {line!r}")
        if line.startswith(b"{") and (message := json.loads(line)).get("event") == event:
            return message["url"]
    raise TimeoutError(f"{process.args} was not ready within {START_S:.0f} s")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.02)
