"""Runs the micro-benchmarks, each in a process of its own that prints one JSON line."""

import json
import subprocess
import sys

from benchmarks.contenders import ROOT
from benchmarks.runner import environment

MICRO = (
    "own-cost",
    "metrics-cost",
    "normalize-cost",
    "info-cost",
    "live-pages",
    "subprocess-envs",
    "vector-cost",
    "hand-over",
    "ray-hand-over",
    "memory",
    "control-plane",
    "postproc",
    "ray-start",
)
LIMIT_S = 300.0


def run_micro(name: str, *, quick: bool) -> dict:
    """Rows of one micro-benchmark, or why there are none."""
    command = [sys.executable, "-m", f"benchmarks.micro.{name.replace('-', '_')}", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer within {LIMIT_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    words = done.stderr.strip().splitlines()
    return {"failure": words[-1][-300:] if words else f"it ended with exit code {done.returncode} and said nothing"}
