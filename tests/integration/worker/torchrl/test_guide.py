"""The snippets of migrating-from-torchrl.md run as they stand."""

from importlib.util import find_spec

import pytest

from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import blocks

BLOCKS = blocks("docs/how-to/migrating-from-torchrl.md", "python")
OURS = [block for block in BLOCKS if block.startswith("# Cormorant")]
THEIRS = [block for block in BLOCKS if block.startswith("# TorchRL")]
NEEDS_TORCHRL = pytest.mark.skipif(
    find_spec("torchrl") is None, reason="TorchRL is not installed: its half is left out"
)


def test_every_block_is_somebodys() -> None:
    assert (len(OURS), len(THEIRS), len(BLOCKS)) == (4, 4, 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", [*OURS, *(pytest.param(block, marks=NEEDS_TORCHRL) for block in THEIRS)])
def test_both_halves_run_as_they_stand(block: str) -> None:
    # A Ray of its own; at Ray's niceness of 15, workers never start beside other work.
    done = run_script(block, timeout=280, RAY_ADDRESS="local", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
