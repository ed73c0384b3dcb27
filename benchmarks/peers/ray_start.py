"""How long RayCollector takes from its constructor to its first batch, the start of Ray among it.

`--words torchrl | cormorant`: whose RayCollector. Both under the peers' interpreter, with the same arguments, the same
network and the same EnvPool tasks. Prints `{"seconds": s}`.
"""

import argparse
import functools
import json
import time
import warnings
from typing import Any

import ray
import torch

from benchmarks.peers.torchrl_collectors import ENDLESS
from benchmarks.peers.torchrl_env import make_env, make_policy
from benchmarks.workloads import WORKLOADS, Workload

COLLECTORS = 4


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", choices=("torchrl", "cormorant"), required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="cartpole-64")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS[args.workload]
    policy = make_policy(workload, "module")
    make = _theirs if args.words == "torchrl" else _ours
    began = time.perf_counter()
    collector = make(workload, policy)
    next(iter(collector))
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    collector.shutdown()
    ray.shutdown()


def _arguments(workload: Workload) -> dict[str, Any]:
    frames = workload.steps_per_batch * workload.share(COLLECTORS)
    # TorchRL's collectors ask for a processor each.
    init = {"address": "local", "num_cpus": COLLECTORS, "include_dashboard": False, "log_to_driver": False}
    return {"frames_per_batch": frames, "total_frames": ENDLESS, "sync": False, "ray_init_config": init}


def _theirs(workload: Workload, policy: Any) -> Any:
    from torchrl.collectors.distributed import RayCollector

    makers = [
        functools.partial(make_env, workload, num_envs=workload.share(COLLECTORS), num_threads=1, seed=1000 * (i + 1))
        for i in range(COLLECTORS)
    ]
    return RayCollector(makers, policy, **_arguments(workload))


def _ours(workload: Workload, policy: Any) -> Any:
    from cormorant.torchrl import MultiThreadedEnv, RayCollector

    maker = functools.partial(
        MultiThreadedEnv,
        workload.share(COLLECTORS),
        workload.task_id,
        create_env_kwargs={"num_threads": 1},
        categorical_action_encoding=True,
    )
    return RayCollector([maker] * COLLECTORS, policy, **_arguments(workload))


if __name__ == "__main__":
    main()
