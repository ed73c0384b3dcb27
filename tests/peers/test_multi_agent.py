"""The Python of docs/how-to/multi-agent.md: on an environment of its own, and into TorchRL's MAPPO and QMIX losses."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import blocks

OWN, MAPPO, QMIX, DUEL, SELF_PLAY = blocks("docs/how-to/multi-agent.md", "python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(script: str, folder: Path) -> list[str]:
    done = run_script(script, cwd=folder, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_environment_of_ones_own_is_collected(tmp_path: Path) -> None:
    assert "torch.Size([4, 64, 2, 1])" in run(OWN, tmp_path)


def test_a_player_learns_against_its_own_past(tmp_path: Path) -> None:
    (tmp_path / "duel.py").write_text(DUEL)
    played = [line.partition("against ")[2] for line in run(SELF_PLAY, tmp_path) if line.startswith("won ")]
    assert len(played) == 20
    assert len(played[-1].split(",")) > 5


@pytest.mark.parametrize(("script", "is_expected"), [(MAPPO, lambda reward: reward < 0), (QMIX, lambda loss: loss > 0)])
def test_losses_of_torchrl_learn_from_batches_as_they_are(
    script: str, is_expected: Callable[[float], bool], tmp_path: Path
) -> None:
    for library in ("torchrl", "mpe2"):
        pytest.importorskip(library, reason=f"{library} is not installed; `make test-peers` runs this test")
    printed = [float(line[7:-1]) for line in run(script, tmp_path) if line.startswith("tensor(")]
    assert len(printed) == 5
    assert all(math.isfinite(number) and is_expected(number) for number in printed)
