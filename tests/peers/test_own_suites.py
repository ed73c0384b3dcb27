"""The peers' own tests and examples, with their collectors exchanged for ours: no test fails but those that the guides
list, and examples run to their ends, with sizes shortened.

`PEERS_SOURCES` names checkouts or source distributions of the peers (folders or .tar.gz, separated as in PATH); without
one they are skipped. `make test-peers` then installs what examples import (the dependency group peers-examples).
`PEERS_VARIANTS=all` runs every variant of every test, which takes an hour; else those of TorchRL's collectors are
sampled. `differences/` lists the tests that fail, each with its row of the guide.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.scripts import environment

RUNS_ALL = os.environ.get("PEERS_VARIANTS") == "all"
SUITE_S = 9000 if RUNS_ALL else 2300
EXAMPLE_S = 800
GUIDES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
HERE = Path(__file__).parent
PRIVATE = re.compile(
    r"^(\s+)(assert .*\b(?:c|c?collector)\._(?:frames|iter|use_buffers|weight_sync_schemes|wrapped_policy)\b.*"
    r"|assert isinstance\(\n\s+collector\._weight_sync_schemes[^)]*\)|collector_(?:frames|iter) = collector\._\w+"
    r"|(?:saved_traj_id = |assert collector\.state_dict\(\)).*\btraj_pool\b.*)$",
    re.MULTILINE,
)
"""Lines that look into private attributes of TorchRL's collectors, or at the pool of ids in their states: left
out, so that the rest of each test judges."""


SUITES = [
    ("tianshou", "test/base/test_collector.py", True),
    ("torchrl", "test/test_postprocs.py", True),
    ("torchrl", "test/libs/test_envpool.py", True),
    ("torchrl", "test/test_collectors.py", RUNS_ALL),  # one or two variants of each test, unless all are asked for
]


def find(file: str, folder: Path) -> Path:
    """The checkout that has a file, or what a source distribution holds of it. Skips the test where there is none."""
    sources = list(filter(None, os.environ.get("PEERS_SOURCES", "").split(os.pathsep)))
    if not sources:  # one reason, so that pytest says in one line what was left out
        pytest.skip("PEERS_SOURCES names no checkouts of the peers: their own tests and examples were left out")
    for given in sources:
        path = Path(given)
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            path = folder
        for root in (path, *(child for child in path.iterdir() if child.is_dir())):
            if (root / file).is_file():
                return root
    pytest.skip(f"no checkout of PEERS_SOURCES has {file}: it was left out")


def outcomes(peer: str, tests_file: str, root: Path, folder: Path, *, runs_all: bool) -> dict[str, bool]:
    """By name of a test, `TestClass.test_name[case]`: whether it passed. Those that were skipped are not there."""
    report = folder / "report.xml"
    # The tests alone: a checkout's own package would be imported in place of the one that is installed.
    tests = Path(tests_file).parts[0]
    shutil.copytree(root / tests, folder / "alone" / tests)
    root = folder / "alone"
    file = root / tests_file
    file.write_text(PRIVATE.sub(r"\1pass", file.read_text()))
    paths = [str(root), str(file.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [
        sys.executable, "-m", "pytest", tests_file, "-p", "cormorant_testing.swapped", "-p", "no:cacheprovider", "-q",
        "-W", "ignore", "--timeout", "300", "--junitxml", str(report),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=root,
        env={
            **os.environ,
            "SWAPPED_PEER": peer,
            "OMP_NUM_THREADS": "1",  # small networks: more threads wait for each other beside other work
            "SWAPPED_VARIANTS": "all" if runs_all else "one",
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=SUITE_S,
        check=False,
    )
    assert report.is_file(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # our own run's report
        parts = str(case.get("classname")).split(".")
        group = parts[-1] + "." if parts[-1].startswith("Test") else ""
        if case.find("skipped") is None:
            found[f"{group}{case.get('name')}"] = case.find("failure") is None and case.find("error") is None
    return found


@pytest.mark.slow
@pytest.mark.timeout(SUITE_S + 100)
@pytest.mark.parametrize(("peer", "file", "runs_all"), SUITES)
def test_a_peers_own_tests_fail_only_where_the_guide_says(peer: str, file: str, runs_all: bool, tmp_path: Path) -> None:
    for library in ("tianshou", "torchrl"):
        pytest.importorskip(library, reason=f"{library} is not installed; `make test-peers` runs these tests")
    passed = outcomes(peer, file, find(file, tmp_path), tmp_path, runs_all=runs_all)
    assert passed
    # By a test's name, in which * stands for anything, why it fails here.
    lines = (HERE / "differences" / f"{peer}-{Path(file).stem}.txt").read_text().splitlines()
    patterns = [line.split("  ", 1)[0] for line in lines if line and not line.startswith("#")]
    covered = {
        pattern: [name for name in passed if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name)]
        for pattern in patterns
    }
    listed = {name for names in covered.values() for name in names}
    assert sorted(name for name, has_passed in passed.items() if not has_passed and name not in listed) == []
    # Every pattern covers failing tests alone.
    assert sorted(name for name in listed if passed[name]) == []
    assert [pattern for pattern, names in covered.items() if runs_all and not names] == []


# -- examples --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    file: str
    changes: Sequence[tuple[str, str]]
    """What a user changes, the import and what the guide lists; then sizes and displays."""
    arguments: Sequence[str] = ()
    imports_in: str = ""
    """The module beside the script that imports the collector; the script itself if empty."""
    needs: Sequence[str]
    """Modules."""
    says: str = ""
    """In its output at the end."""


TORCHRL = ("from torchrl.collectors import Collector", "from cormorant_compat.torchrl import Collector")
TIANSHOU = (
    "from tianshou.data import Collector, CollectStats,",
    "from cormorant_compat.tianshou import Collector\nfrom tianshou.data import CollectStats,",
)
MUJOCO = "hydra imageio mujoco"
TIANSHOU_MUJOCO = "tensorboard docstring_parser imageio jsonargparse mujoco"


def of_torchrl(file: str, needs: str, says: str, arguments: str, **more: Any) -> Example:
    file, needed = f"sota-implementations/{file}.py", ["torchrl", *needs.split()]
    return Example(file=file, changes=[TORCHRL], needs=needed, says=says, arguments=arguments.split(), **more)


def of_tianshou(
    file: str, needs: str, arguments: str, *, changes: Sequence[tuple[str, str]] = (TIANSHOU,), **more: Any
) -> Example:
    needed = ["tianshou", *needs.split()]
    return Example(file=f"examples/{file}.py", changes=changes, needs=needed, arguments=arguments.split(), **more)


EXAMPLES = [
    *(
        of_torchrl(
            f"multiagent/{name}", "hydra vmas gym", "Iteration 2",
            "collector.frames_per_batch=600 collector.n_iters=3 train.num_epochs=1 train.minibatch_size=200 "
            "logger.backend=",
        )
        for name in ("mappo_ippo", "iql")
    ),
    of_torchrl(
        "dqn/dqn_cartpole", "hydra", "1200/1200",
        "collector.total_frames=1200 collector.frames_per_batch=200 collector.init_random_frames=400 logger.backend= "
        "loss.num_updates=4 checkpoint.path=saved checkpoint.interval=400",
    ),
    of_torchrl(
        "ppo/ppo_mujoco", MUJOCO, "512/512",
        "collector.total_frames=512 collector.frames_per_batch=256 loss.ppo_epochs=1 logger.backend=",
    ),
    of_torchrl(
        "a2c/a2c_mujoco", MUJOCO, "1280/1280",
        "collector.total_frames=1280 logger.backend= logger.test_interval=640",
    ),
    of_torchrl(
        "td3/td3", MUJOCO, "2000/2000",
        "collector.total_frames=2000 collector.frames_per_batch=200 collector.init_random_frames=1000 "
        "optim.utd_ratio=0.05 env.max_episode_steps=100 logger.eval_iter=1000 logger.backend=",
        imports_in="utils.py",
    ),
    of_torchrl(
        "discrete_sac/discrete_sac", "hydra", "1500/1500",
        "collector.total_frames=1500 collector.frames_per_batch=250 collector.init_random_frames=500 "
        "optim.utd_ratio=0.05 logger.eval_iter=500 logger.backend= env.library=gymnasium",
        imports_in="utils.py",
    ),
    of_tianshou(
        "discrete/discrete_dqn", "tensorboard", "", says="Finished training in",
        changes=[
            ("import tianshou as ts\n", "import tianshou as ts\nfrom cormorant_compat.tianshou import Collector\n"),
            ("ts.data.Collector", "Collector"),
            ("num_training_envs, num_test_envs = 10, 100", "num_training_envs, num_test_envs = 10, 4"),
            ("lr, epoch, batch_size = 1e-3, 10,", "lr, epoch, batch_size = 1e-3, 1,"),
            ("epoch_num_steps, collection_step_num_env_steps = 10000, 10",
             "epoch_num_steps, collection_step_num_env_steps = 200, 10"),
            (', render_mode="human")', ")"),
            ("n_episode=100, render=1 / 35)", "n_episode=2)"),
        ],
    ),
    of_tianshou(
        "mujoco/mujoco_ppo", TIANSHOU_MUJOCO,
        "--epoch 1 --epoch_num_steps 512 --collection_step_num_env_steps 256 --update_step_num_repetitions 1 "
        "--num_training_envs 4 --num_test_envs 2 --buffer_size 512",
    ),
    of_tianshou(
        "box2d/acrobot_dualdqn", "tensorboard", "--epoch 1 --epoch_num_steps 2000 --num_test_envs 2",
        changes=[TIANSHOU, ("    assert stop_fn(result.best_reward)\n", "")], says="best_reward=",
    ),
    of_tianshou(
        "mujoco/mujoco_sac", TIANSHOU_MUJOCO,
        "--epoch 1 --epoch_num_steps 200 --start_timesteps 300 --num_training_envs 2 --num_test_envs 2 "
        "--buffer_size 1000 --collection_step_num_env_steps 2",
    ),
    Example(
        file="examples/distributed/collectors/multi_nodes/ray_collect.py", needs=["torchrl", "ray"],
        says="batch 5, total frames 1000",
        changes=[
            ("from torchrl.collectors.distributed.ray import RayCollector",
             "from cormorant_compat.torchrl import RayCollector"),
            ("5 * 1024**3", "512 * 1024**2"), ("2 * 1024**3", "256 * 1024**2"), ("10000", "1000"),
        ],
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(EXAMPLE_S + 100)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: Path(example.file).stem)
def test_a_peers_example_runs_to_its_end(example: Example, tmp_path: Path) -> None:
    root = find(example.file, tmp_path)
    if missing := [name for name in example.needs if find_spec(name) is None]:
        pytest.skip(f"{example.file} imports {', '.join(missing)}, which is not installed")
    folder = tmp_path / "example"
    shutil.copytree((root / example.file).parent, folder)
    script = folder / Path(example.file).name
    changed = folder / example.imports_in if example.imports_in else script
    text = changed.read_text()
    for old, new in example.changes:
        assert old in text, f"the example has changed: {old}"
        text = text.replace(old, new)
    changed.write_text(text)
    # Threads of small networks wait for each other beside other work; at Ray's niceness of 15 workers never start.
    env = environment(OMP_NUM_THREADS="1", RAY_worker_niceness="0")
    command = [sys.executable, "-W", "ignore", script.name, *example.arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=EXAMPLE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert example.says in done.stdout + done.stderr


def test_the_guides_list_every_example() -> None:
    guides = "".join((GUIDES / f"migrating-from-{peer}.md").read_text() for peer in ("tianshou", "torchrl"))
    assert [example.file for example in EXAMPLES if f"`{example.file}`" not in guides] == []
