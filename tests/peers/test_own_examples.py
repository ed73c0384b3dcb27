"""The peers' own examples, with the import exchanged and the sizes shortened, run to their ends.

`PEERS_SOURCES` names checkouts of the peers, as in test_own_suites.py; `make test-peers` then installs what they import
(the dependency group peers-examples).
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.peers import find
from cormorant_testing.scripts import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "how-to"
LIMIT_S = 800


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
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert example.says in done.stdout + done.stderr


def test_the_guides_list_every_example() -> None:
    guides = "".join((GUIDES / f"migrating-from-{peer}.md").read_text() for peer in ("tianshou", "torchrl"))
    assert [example.file for example in EXAMPLES if f"`{example.file}`" not in guides] == []
