"""Batches that are played without the host between two steps are those that are played step by step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cormorant_testing.collecting import assert_same
from cormorant_testing.placements.echo_env import STEPS, EchoEnv
from cormorant_testing.placements.echo_jax import EchoFunctions
from cormorant_testing.placements.echo_torch import make_vector
from cormorant_testing.placements.witness import build_policy
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.rollout import DeviceRollout, ScanRollout
from cormorant_worker.errors import EnvCrashed, InvalidAction
from cormorant_worker.launch import make_collector
from cormorant_worker.policy.exploration import ExplorationType
from cormorant_worker.policy.jax_policy import JaxPolicy

N = 5
INFO = [{"key": "echo", "dtype": "float32"}, {"key": "won", "dtype": "bool", "fill": 0}]
ENVS: dict[str, Any] = {
    "same": partial(make_vector, mode="same"),
    "whole": partial(make_vector, mode="whole"),
    "jax": EchoFunctions,
}


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: a list of operations, done again on the same memory."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.done: list[Any] = []
        with torch.random.fork_rng(devices=[]), self:
            act()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    def __call__(self) -> None:
        for func, args, kwargs, result in self.done:
            for before, now in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def opened(env: str, policy: str | None, *, record: Any = None, **collection: Any) -> Collector:
    torch.manual_seed(0)
    made = None if policy is None else build_policy(5, 2, kind=policy, is_discrete=False)
    collection = {"seed": 7, **collection}
    collector = make_collector(env=ENVS[env], num_envs=N, info=INFO, policy=made, collection=collection)
    rollout = collector._rollout
    assert isinstance(rollout, ScanRollout if policy is None else DeviceRollout)
    if isinstance(rollout, DeviceRollout):
        rollout.record = record
    return collector


def batches(collector: Collector) -> list[Any]:
    """Whole batches, one of columns of different lengths, episodes, a batch that is sealed, and weights between."""
    found = [collector.collect(num_steps=rows * N).clone() for rows in (40, 3, 40)]
    found += [collector.collect(num_steps=11 * N + 2), collector.collect(num_steps=20 * N)]
    if collector.actor is not collector.warmup:
        if collector.env_groups[0].env.lockstep:
            found.append(collector.collect(num_episodes=7))
        weights = {name: value + 0.5 for name, value in collector.weights.current()["policy"].items()}
        collector.weights.offer({"policy": weights}, version=1)
    found.append(collector.collect(num_steps=35 * N).clone())
    collector.gate.ticket = -1  # sealed
    found.append(collector.collect(num_steps=40 * N).clone())
    collector.gate.ticket = 0
    return [*found, collector.collect(num_steps=40 * N)]


@pytest.mark.parametrize("record", [None, Tape])
@pytest.mark.parametrize("policy", ["module", "memory", "tensordict", "recurrent"])
@pytest.mark.parametrize(("env", "normalize"), [("same", None), ("whole", {"observation": {"clip": 3}})])
def test_a_policy_and_its_environments_on_one_device(env: str, policy: str, normalize: Any, record: Any) -> None:
    with (
        opened(env, policy, record=record, normalize=normalize) as ours,
        opened(env, policy, normalize=normalize) as plain,
    ):
        compare(ours, plain)
        if record is not None:
            graphs = ours._rollout._rows.graphs
            assert graphs.num_recorded == 40, graphs.refused


class OnTheHost(torch.nn.Module):
    """Its actions depend on what a recorded call does not do again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        match self.what:
            case "counts":
                self.calls += 1
            case "draws":
                self.calls = 0 if np.random.random() < 0.5 else 1
            case "reads":
                return torch.full((N, 2), float(observation.mean().clamp(-1, 1)))
            case "chooses":
                return torch.zeros(N, 2).index_fill(0, torch.nonzero(observation[:, 0] > 0)[:, 0], 1)
        return torch.full((N, 2), self.calls % 3 / 4)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("counts", "on the host"),
        ("draws", "on the host"),
        ("reads", "waits for its device in aten._local_scalar_dense"),
        ("chooses", "waits for its device in aten.nonzero"),
    ],
)
def test_a_policy_that_needs_the_host_is_not_recorded(what: str, reason: str) -> None:
    np.random.seed(0)
    with make_collector(env=ENVS["same"], num_envs=N, policy=OnTheHost(what)) as collector:
        collector._rollout.record = Tape
        actions = torch.cat([collector.collect(num_steps=8 * N)["action"] for _ in range(4)], dim=1)
        graphs = collector._rollout._rows.graphs
        assert reason in graphs.refused
        assert graphs.num_recorded == 0
    if what == "counts":
        np.testing.assert_array_equal(actions[0, :, 0] * 4, (np.arange(32) + 2) % 3)


def test_a_batch_is_handed_over_on_its_device() -> None:
    with opened("same", "recurrent") as ours, opened("same", "recurrent") as plain:
        kept = []
        for rows in (40, 40, 3):
            found = ours.collect(num_steps=rows * N, device="cpu")
            kept.append((found, found.clone(), plain.collect(num_steps=rows * N).clone()))
        found, before, wanted = zip(*kept, strict=True)
        assert_same(found, wanted)
        assert_same(found, before)  # written once
        assert ours.collect(num_steps=11 * N + 2, device="cpu").device == torch.device("cpu")


def test_random_actions_in_one_loop() -> None:
    with opened("jax", None) as ours, opened("jax", None) as plain:
        compare(ours, plain)
        assert (plain.timing.take().env_step_s > 0) == (ours.timing.take().env_step_s > 0)


def compare(ours: Collector, plain: Collector) -> None:
    plain._rollout = None
    has_ended, is_short = 0, False
    for found, wanted in zip(batches(ours), batches(plain), strict=True):
        # A scan is sealed after several steps, and not after one.
        is_short |= (rows := min(found.shape[1], wanted.shape[1])) < 40
        has_ended += int(wanted["next", "done"].sum())
        if found.shape != wanted.shape:
            break
        assert_same([found[:, :rows]], [wanted[:, :rows]])
    assert has_ended > 60
    assert is_short
    assert np.array_equal(ours.pulse, plain.pulse) or isinstance(ours._rollout, ScanRollout)


def act(params: Any, observation: Any, key: Any) -> Any:
    """A policy in JAX that says what it saw."""
    mean = jnp.tanh(observation @ params["layer"]["kernel"]) / 2 + params["shift"]
    drawn = 0.0 if key is None else jax.random.normal(key, mean.shape)
    return {"action": jnp.clip(mean + drawn / 4, -1, 1), "seen": observation, "net": {"mean": mean}}


@pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.MODE])
def test_a_policy_in_jax_in_one_loop(exploration: ExplorationType) -> None:
    kernel = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
    policy = partial(JaxPolicy, act, {"layer": {"kernel": kernel}, "shift": np.zeros(2, np.float32)})
    ours, plain = (make_collector(env=EchoFunctions, num_envs=N, info=INFO, policy=policy(), seed=7) for _ in "12")
    with ours, plain:
        ours._config = plain._config = replace(ours._config, exploration_type=exploration)
        plain.rng.state = ours.rng.state
        assert isinstance(ours._rollout, ScanRollout)
        compare(ours, plain)
        assert (ours.weights.current()["policy"]["params.shift"] == 0.5).all(), "published weights act"


def played_both_ways(kind: type, num_steps: int, **script: Any) -> Any:
    """A batch without the host between two steps, which has the frames of single steps."""
    ours, plain = (make_collector(**script) for _ in "12")
    with ours, plain:
        assert isinstance(ours._rollout, kind)
        plain._rollout = None
        found, wanted = (collector.collect(num_steps=num_steps) for collector in (ours, plain))
    assert_same([found], [wanted])
    return found


@pytest.mark.filterwarnings("error")
def test_an_action_in_bfloat16_is_one_in_float32() -> None:
    def act(params: Any, observation: Any, key: Any) -> Any:
        return jnp.tanh(observation[:, :2] + params["shift"]).astype(jnp.bfloat16)

    policy = JaxPolicy(act, {"shift": jnp.zeros(2, jnp.bfloat16)})
    assert played_both_ways(ScanRollout, 20 * N, env=EchoFunctions, num_envs=N, policy=policy)["action"].any()


class Flags(EchoFunctions):
    """Sees whether its episode was won, too."""

    def reset(self, key: Any, params: None) -> Any:
        obs, state = super().reset(key, params)
        return {"echo": obs, "won": jnp.bool_(False)}, state

    def step_env(self, key: Any, state: Any, action: Any, params: None) -> Any:
        obs, state, reward, is_won, info = super().step_env(key, state, action, params)
        return {"echo": obs, "won": is_won}, state, reward, is_won, info

    def observation_space(self, params: None) -> Any:
        return None


def test_flags_of_functions_in_one_loop() -> None:
    batch = played_both_ways(ScanRollout, 40 * N, env=Flags, num_envs=N, seed=7)
    assert batch["next", "observation", "won"].any()


def test_functions_give_their_tensors_without_a_copy() -> None:
    """As on a GPU, where numpy cannot read JAX's memory."""
    policy = partial(build_policy, 5, 2, kind="module", is_discrete=False)
    made = [make_collector(env=EchoFunctions, num_envs=N, info=INFO, policy=policy(), seed=7) for _ in "12"]
    for collector in made:
        assert collector._rollout is None, "numpy is faster here"
        collector._envs[0].device = torch.device("cpu")
        collector._start_env_groups()
        collector.rng.state = torch.Generator().manual_seed(1).get_state()
    with made[0] as ours, made[1] as plain:
        plain._rollout = None
        for _ in range(3):
            assert_same(*([collector.collect(num_steps=24 * N)] for collector in (ours, plain)))


class Simulator(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Ends every episode after 4 steps; `does` says what is wrong with it."""

    metadata = {"autoreset_mode": "SameStep"}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, num_envs: int, *, does: str = "") -> None:
        self.num_envs, self.does, self.steps = num_envs, does, 0
        self.kept = torch.zeros(num_envs, 1)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert not options, "no options"
        self.steps = 0
        return torch.zeros(self.num_envs, 2), {}

    def step(self, actions: torch.Tensor) -> Any:
        self.steps += 1
        ended = torch.full((self.num_envs,), self.steps % 4 == 0)
        last = torch.full((self.num_envs, 2), float((self.steps - 1) % 4 + 1))
        obs = torch.where(ended[:, None], 0.0, last)
        reward, info = actions[:, 0], {"final_obs": last}
        flags = ended, torch.zeros_like(ended)
        match self.does:
            case "keep":
                assert actions.dtype == torch.float32
                reward, self.kept = actions[:, 0] + self.kept[:, 0], actions.mul_(2)
            case "counts":
                flags = ended.to(torch.uint8), flags[1].numpy()
                info |= {"step": last[:, 0], "_step": last[:, 1].to(torch.uint8) % 2}
            case "lazy":
                info["final_obs"] = last if ended.any() else obs
            case "objects":
                info["final_obs"] = np.full(self.num_envs, None)
            case "nan":
                last[1, 0] = torch.nan
            case "nan reward":
                reward = torch.where(ended, torch.nan, reward)
            case "alias":
                info = {"final_obs": obs}
            case "equal":
                info = {"final_obs": obs.clone()}
            case "none":
                info = {}
            case "shape":
                reward = reward[:, None]
            case "doubles":
                obs = obs.double()
        return obs, reward, *flags, info


@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        ("nan", "environment 1 returned NaN in observation"),
        ("nan reward", "environment 0 returned a NaN reward"),
        ("alias", "in the memory of the observations"),
        ("equal", "equals the first observation of the next episode"),
        ("none", 'gives no info."final_obs".*compute_final_obs=True'),
        ("objects", r"observation of shape \(3,\)"),
        ("shape", "reward and flags of shapes .*3, 1"),
    ],
)
def test_what_single_steps_refuse_is_refused(does: str, sentence: str) -> None:
    with make_collector(env=partial(Simulator, does=does), num_envs=3, policy=constant(0.5)) as collector:
        assert isinstance(collector._rollout, DeviceRollout)
        with pytest.raises(EnvCrashed, match=sentence):
            collector.collect(num_steps=60)


@pytest.mark.parametrize("does", ["counts", "lazy", "doubles"])
def test_what_single_steps_accept_is_accepted(does: str) -> None:
    script = {"num_envs": 3, "info": [{"key": "step", "dtype": "float32", "shape": []}], "policy": constant(0.5)}
    found = played_both_ways(DeviceRollout, 30, env=partial(Simulator, does=does), **script)
    assert found["observation"].dtype == torch.float32
    np.testing.assert_array_equal(found["observation"][0, :, 0], [t % 4 for t in range(10)])


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_actions_are_the_environments_own(dtype: torch.dtype, is_plain: bool) -> None:
    memory = torch.zeros(3, 1, dtype=dtype)
    with make_collector(
        env=partial(Simulator, does="keep"), num_envs=3, policy=lambda seen: memory.copy_(seen[:, :1] / 8)
    ) as collector:
        assert isinstance(collector._rollout, DeviceRollout)
        if is_plain:
            collector._rollout = None
        batch = collector.collect(num_steps=30)
    actions = batch["action"][..., 0]
    np.testing.assert_array_equal(actions[0], [t % 4 / 8 for t in range(10)])
    np.testing.assert_array_equal(batch["next", "reward"][:, 1:, 0], actions[:, 1:] + 2 * actions[:, :-1])


@pytest.mark.parametrize(
    ("env", "is_plain", "is_restored"),
    [(ENVS["same"], False, False), (ENVS["same"], True, False), (EchoEnv, True, False), (EchoEnv, True, True)],
)
def test_episodes_begin_anew_after_a_batch_that_raised(env: Any, is_plain: bool, is_restored: bool) -> None:
    value = torch.tensor(torch.nan)

    def opened() -> Collector:
        collector = make_collector(
            env=env, num_envs=N, policy=lambda seen: torch.where(seen[:, 2:3] > 1 / STEPS, value, 0.5).repeat(1, 2)
        )
        collector._rollout = None if is_plain else collector._rollout
        return collector

    def fail(collector: Collector) -> None:
        value.fill_(torch.nan)
        words = "no environment was stepped" if collector._rollout is None else "the batch is dropped"
        with pytest.raises(InvalidAction, match=rf"environment \d is \[nan, nan\].*; {words}"):
            collector.collect(num_steps=20 * N)
        value.fill_(0.5)

    with opened() as collector, opened() as other:
        before, saved = collector.collect(num_steps=2 * N)["collector", "traj_ids"], collector.state()
        fail(collector)
        fail(collector)
        if is_restored:
            collector.restore(saved)
            other.restore(saved)
            ours, theirs = (again.collect(num_steps=10 * N)["observation"].numpy() for again in (collector, other))
            np.testing.assert_array_equal(ours, theirs)
            assert ours[:, 0, 2].any()
            fail(collector)
            other.restore(collector.state())
        batch = (other if is_restored else collector).collect(num_steps=10 * N)
    assert not batch["observation"][:, 0, 2].any()
    np.testing.assert_array_equal(batch["next", "observation"][..., 2], batch["observation"][..., 2] + 1 / STEPS)
    assert int(batch["collector", "traj_ids"].min()) > int(before.max())


def constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda observation: torch.full((len(observation), 1), value if observation.any() else 0.5)
