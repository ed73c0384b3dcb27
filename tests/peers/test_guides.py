"""The migration guides: snippets run as they stand, and tables have every argument of the installed peers. The Python
of docs/how-to/multi-agent.md.
"""

import inspect
import math
import pkgutil
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import blocks, names_in

TORCHRL = blocks("docs/how-to/migrating-from-torchrl.md", "python")
OURS = [block for block in TORCHRL if block.startswith("# Cormorant")]
THEIRS = [block for block in TORCHRL if block.startswith("# TorchRL")]
NEEDS_TORCHRL = pytest.mark.skipif(
    find_spec("torchrl") is None, reason="TorchRL is not installed: its half is left out"
)
TIANSHOU = blocks("docs/how-to/migrating-from-tianshou.md", "python")
SNIPPETS = {found[1]: block for block in TIANSHOU if (found := re.match(r"# (\w+: \w+)\n", block))}


def test_no_snippet_is_left_out() -> None:
    assert (len(OURS), len(THEIRS), len(TORCHRL), len(SNIPPETS), len(TIANSHOU)) == (4, 4, 8, 5, 5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", [*OURS, *(pytest.param(block, marks=NEEDS_TORCHRL) for block in THEIRS)])
def test_both_halves_for_torchrl_run_as_they_stand(block: str) -> None:
    # A Ray of its own; at Ray's niceness of 15, workers never start beside other work.
    done = run_script(block, timeout=280, RAY_ADDRESS="local", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def run(*names: str) -> str:
    printed: list[str] = []
    space = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    for name in names:
        exec(compile(SNIPPETS[name], name, "exec"), space)  # the guide's own code
    return "\n".join(printed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["tianshou", "cormorant"])
def test_both_sides_for_tianshou_run_as_they_stand(side: str) -> None:
    pytest.importorskip("tianshou", reason="Tianshou is not installed; `make test-peers` runs this test")
    collected, returned = run(f"{side}: cartpole", f"{side}: evaluation").splitlines()
    assert collected.startswith("800 ")
    assert float(returned) >= 8


def test_the_side_without_tianshou_runs_without_it() -> None:
    assert run("cormorant: alone").startswith("800 torch.Size([8, ")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("guide", "section", "path"),
    [
        ("torchrl", "`RayCollector", "torchrl.collectors.distributed:RayCollector.__init__"),
        ("torchrl", "`sync_sync_collector", "torchrl.trainers.helpers.collectors:sync_sync_collector"),
        ("torchrl", "`sync_sync_collector", "torchrl.trainers.helpers.collectors:sync_async_collector"),
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:make_collector_onpolicy"),
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:make_collector_offpolicy"),
        ("torchrl", "`MultiThreadedEnv", "torchrl.envs:MultiThreadedEnv.__init__"),
        ("tianshou", "`Collector", "tianshou.data:Collector.__init__"),
        ("tianshou", "`Collector", "tianshou.data:AsyncCollector.__init__"),
        ("tianshou", "`collect(", "tianshou.data:Collector.collect"),
        ("torchrl", "`make_collector", "torchrl.trainers.helpers.collectors:OffPolicyCollectorConfig"),
        ("tianshou", "Methods", "tianshou.data:CollectStats"),
    ],
)
def test_every_name_of_the_installed_release_has_its_row(guide: str, section: str, path: str) -> None:
    module = path.partition(":")[0]
    pytest.importorskip(module, reason=f"{module} is not installed; `make test-peers` runs this test")
    names = set(inspect.signature(pkgutil.resolve_name(path)).parameters) - {"self", "kwargs"}
    assert names - names_in(f"how-to/migrating-from-{guide}.md", section) == set()


OWN, MAPPO, QMIX, DUEL, SELF_PLAY = blocks("docs/how-to/multi-agent.md", "python")


def lines_of(script: str, folder: Path) -> list[str]:
    done = run_script(script, cwd=folder, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_environment_of_ones_own_is_collected(tmp_path: Path) -> None:
    assert "torch.Size([4, 64, 2, 1])" in lines_of(OWN, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_player_learns_against_its_own_past(tmp_path: Path) -> None:
    (tmp_path / "duel.py").write_text(DUEL)
    played = [line.partition("against ")[2] for line in lines_of(SELF_PLAY, tmp_path) if line.startswith("won ")]
    assert len(played) == 20
    assert len(played[-1].split(",")) > 5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "is_expected"), [(MAPPO, lambda reward: reward < 0), (QMIX, lambda loss: loss > 0)])
def test_losses_of_torchrl_learn_from_batches_as_they_are(
    script: str, is_expected: Callable[[float], bool], tmp_path: Path
) -> None:
    for library in ("torchrl", "mpe2"):
        pytest.importorskip(library, reason=f"{library} is not installed; `make test-peers` runs this test")
    printed = [float(line[7:-1]) for line in lines_of(script, tmp_path) if line.startswith("tensor(")]
    assert len(printed) == 5
    assert all(math.isfinite(number) and is_expected(number) for number in printed)
