"""The start of a RayCollector with four collectors against TorchRL's: `peers/ray_start.py`, each in its own process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.contenders import PEERS_PYTHON, ROOT
from benchmarks.micro import rows
from benchmarks.runner import environment

LIMIT_S = 120.0


def measure(*, quick: bool) -> Sequence[dict]:
    pairs = [(_seconds("torchrl"), _seconds("cormorant")) for _ in range(1 if quick else 3)]
    ratio = median(theirs / ours for theirs, ours in pairs)
    note = f"{median(theirs for theirs, _ in pairs):.1f} s and {median(ours for _, ours in pairs):.1f} s"
    return [
        rows.row("RayCollector, 4 collectors, to its first batch, TorchRL / ours", ratio, "x", bar="> 1", note=note)
    ]


def _seconds(words: str) -> float:
    done = subprocess.run(
        [PEERS_PYTHON, "-m", "benchmarks.peers.ray_start", "--words", words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(line)["seconds"])


if __name__ == "__main__":
    if not PEERS_PYTHON.exists():
        sys.exit("there is no .venv-peers; benchmarks/peers/setup makes it")
    rows.main(measure)
