"""Who takes part, in which order, under which interpreter."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SAMPLE_FACTORY_PYTHON = ROOT / ".venv-sample-factory" / "bin" / "python"

Family = Literal["policy", "random"]
"""Workloads with a network, or with random actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One script and its arguments, measured in a process of its own."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    families: tuple[Family, ...] = ("policy",)
    in_quick: bool = True
    """Takes part in a `--quick` run."""
    starts_alone: bool = False
    """Its start measures something, or starts so much at once that it gets the machine for itself."""

    def command(self, workload: str) -> list[str]:
        return [
            str(self.python),
            "-m",
            self.module,
            "--serve",
            "--workload",
            workload,
            *self.arguments,
        ]


BARE = Contender(name="bare loop", module="benchmarks.bare", families=("policy", "random"))
ENVS_ALONE = Contender(name="EnvPool alone", module="benchmarks.bare", arguments=("--kind", "envs"))
POLICY_ALONE = Contender(name="policy alone", module="benchmarks.bare", arguments=("--kind", "policy"))
YARDSTICKS = (BARE, ENVS_ALONE, POLICY_ALONE)
"""What the others are compared with; they always run."""

_PEERS = "benchmarks.peers"
_TORCHRL = f"{_PEERS}.torchrl_collectors"
_OURS = "benchmarks.ours"
_AHEAD = ("--settle-takes", "2")
"""One batch a worker lies ready after a pause."""
_QUEUED = ("--settle-takes", "3")
"""Two batches a worker lie in the queue."""

CONTENDERS = (
    *YARDSTICKS,
    Contender(name="bare loop, tuned", module="benchmarks.bare", arguments=("--kind", "tuned")),
    Contender(
        name="cormorant, in process",
        module=_OURS,
        arguments=("--workers", "0"),
        families=("policy", "random"),
        starts_alone=True,
    ),
    Contender(
        name="cormorant, 1 worker",
        module=_OURS,
        arguments=("--workers", "1", *_QUEUED),
        families=("policy", "random"),
        starts_alone=True,
    ),
    Contender(
        name="cormorant, 1 worker, compiled",
        module=_OURS,
        arguments=("--workers", "1", "--compile", "auto", *_QUEUED),
        starts_alone=True,
    ),
    Contender(name="cormorant, 2 workers", module=_OURS, arguments=("--workers", "2", *_QUEUED), starts_alone=True),
    Contender(
        name="cormorant, 2 workers, compiled",
        module=_OURS,
        arguments=("--workers", "2", "--compile", "auto", *_QUEUED),
        starts_alone=True,
    ),
    Contender(
        name="cormorant, 2 workers, bfloat16",
        module=_OURS,
        arguments=("--workers", "2", "--dtype", "bfloat16", *_QUEUED),
        in_quick=False,
        starts_alone=True,
    ),
    Contender(name="TorchRL Collector", module=_TORCHRL, arguments=("--collector", "single"), python=PEERS_PYTHON),
    Contender(
        name="TorchRL MultiSync, 2",
        module=_TORCHRL,
        arguments=("--collector", "multi_sync"),
        python=PEERS_PYTHON,
        in_quick=False,
    ),
    Contender(
        name="TorchRL MultiAsync, 2",
        module=_TORCHRL,
        arguments=("--collector", "multi_async", *_AHEAD),
        python=PEERS_PYTHON,
        in_quick=False,
    ),
    Contender(
        name="TorchRL Ray, 2",
        module=_TORCHRL,
        arguments=("--collector", "ray", *_AHEAD),
        python=PEERS_PYTHON,
        in_quick=False,
        starts_alone=True,
    ),
    Contender(
        name="gymnasium AsyncVectorEnv", module=f"{_PEERS}.gymnasium_vector", python=PEERS_PYTHON, in_quick=False
    ),
    Contender(
        name="gymnasium SyncVectorEnv",
        module=f"{_PEERS}.gymnasium_vector",
        arguments=("--kind", "sync"),
        python=PEERS_PYTHON,
    ),
    Contender(name="SB3 PPO, DummyVecEnv", module=f"{_PEERS}.sb3_rollouts", python=PEERS_PYTHON),
    Contender(
        name="SB3 PPO, SubprocVecEnv",
        module=f"{_PEERS}.sb3_rollouts",
        arguments=("--kind", "subproc"),
        python=PEERS_PYTHON,
        in_quick=False,
    ),
    Contender(
        name="RLlib EnvRunners, 2",
        module=f"{_PEERS}.rllib_env_runners",
        python=PEERS_PYTHON,
        in_quick=False,
        starts_alone=True,
    ),
    Contender(
        name="Sample Factory sampler, 2",
        module=f"{_PEERS}.sample_factory_sampler",
        arguments=_AHEAD,
        python=SAMPLE_FACTORY_PYTHON,
        in_quick=False,
        starts_alone=True,
    ),
    Contender(name="Tianshou Collector", module=f"{_PEERS}.tianshou_collector", python=PEERS_PYTHON),
    Contender(
        name="cormorant, Tianshou layer",
        module="benchmarks.door",
        families=("policy", "random"),
        in_quick=False,
    ),
    Contender(
        name="the same, Tianshou's policy and buffer",
        module=f"{_PEERS}.tianshou_collector",
        arguments=("--door",),
        python=PEERS_PYTHON,
        in_quick=False,
    ),
    Contender(
        name="cormorant, TorchRL layer, 2 workers",
        module="benchmarks.door",
        arguments=("--words", "torchrl", *_QUEUED),
        in_quick=False,
        starts_alone=True,
    ),
)
