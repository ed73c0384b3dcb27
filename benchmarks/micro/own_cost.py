"""What the collector itself costs a vector step of 8 environments, beyond environments and policy.

Twice: around environments and a policy that do nothing, and around CartPole with the MLP. In both the same `send`,
`recv` and `act` run alone in a loop, and the collector's time is what comes on top, batches made into TensorDicts.
"""

from collections.abc import Sequence

import gymnasium
import numpy as np
import torch

from benchmarks.micro import rows
from cormorant.policies import mlp
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, Step, VectorEnv
from cormorant_worker.policy.actor import Acted, Actor, PolicyActor, PolicyModels
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.weights.staged import StagedWeights

NUM_ENVS = 8
STEPS = 256
EPISODE_STEPS = 20


class NullEnv(VectorEnv):
    """Returns the same arrays again and again; every episode has 20 steps, spread over the environments."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    num_envs = NUM_ENVS

    def __init__(self) -> None:
        self._obs = (np.zeros((NUM_ENVS, 4), np.float32),)
        self._steps = [self._step(at) for at in range(EPISODE_STEPS)]
        self._at = 0

    def _step(self, at: int) -> Step:
        ended = np.flatnonzero(np.arange(NUM_ENVS) * 2 == at)
        terminated = np.zeros(NUM_ENVS, np.bool_)
        terminated[ended] = True
        no = np.zeros(NUM_ENVS, np.bool_)
        final = (self._obs[0][ended],)
        return Step(EVERY_ROW, self._obs, np.ones(NUM_ENVS, np.float32), terminated, no, ended, final, NO_ROWS)

    def start(self) -> tuple[np.ndarray, ...]:
        return self._obs

    def send(self, actions: object, which: object) -> None:
        pass

    def recv(self) -> Step:
        self._at = (self._at + 1) % EPISODE_STEPS
        return self._steps[self._at]

    def close(self) -> None:
        pass


class NullActor:
    """Returns the same actions again and again."""

    outputs = ()
    states = ()
    initial_states = ()
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._acted = Acted((np.zeros(NUM_ENVS, np.int64),))

    def act(self, obs: object, states: object, is_init: object) -> Acted:
        return self._acted


def measure(*, quick: bool) -> Sequence[dict]:
    rounds = 5 if quick else 41
    null = NullEnv(), NullActor()
    cartpole = _cartpole()
    return [
        rows.row(
            "own cost a vector step, null env and policy", _own_cost_us(*null, rounds), "us", bar="< 50", note="8 envs"
        ),
        rows.row(
            "own cost a vector step, CartPole and MLP", _own_cost_us(*cartpole, rounds), "us", bar="< 50", note="8 envs"
        ),
    ]


def _cartpole() -> tuple[VectorEnv, Actor]:
    task = EnvPoolTask(task_id="CartPole-v1", kwargs={})
    env = task.open(num_threads=1, seeds=list(range(NUM_ENVS)))
    policy = mlp(env.observation_space, env.action_space)
    models = PolicyModels(policy, {"policy": policy})
    return env, PolicyActor(models, env.observation_space, env.action_space, device=torch.device("cpu"))


def _own_cost_us(env: VectorEnv, actor: Actor, rounds: int) -> float:
    config = CollectorConfig(seeds=WorkerPlace(seed=7, index=0))
    warmup = RandomActor(env.action_space, seed=7)
    collector = Collector([env], actor, config=config, warmup=warmup, weights=StagedWeights({}))
    block = Block(collector.layout(STEPS))

    def collect() -> None:
        collector.fill(block, STEPS * NUM_ENVS)
        to_tensordict(block)

    obs = (np.array(block.observation[0][0]),)
    is_init = np.zeros(NUM_ENVS, np.bool_)

    def alone() -> None:
        with torch.inference_mode():
            for _ in range(STEPS):
                env.send(actor.act(obs, (), is_init).actions, EVERY_ROW)
                env.recv()

    collected, bare = rows.interleaved(collect, alone, rounds=rounds)
    return 1e6 * rows.median_difference(collected, bare) / STEPS


if __name__ == "__main__":
    rows.main(measure)
