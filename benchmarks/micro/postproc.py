"""Post-processing against TorchRL's: `peers/postproc.py`, in the peers' interpreter."""

import subprocess
import sys

from benchmarks.contenders import PEERS_PYTHON, ROOT
from benchmarks.runner import environment

if __name__ == "__main__":
    if not PEERS_PYTHON.exists():
        sys.exit("there is no .venv-peers; benchmarks/peers/setup makes it")
    sys.exit(
        subprocess.run(
            [PEERS_PYTHON, "-m", "benchmarks.peers.postproc", *sys.argv[1:]], cwd=ROOT, env=environment(), check=False
        ).returncode
    )
