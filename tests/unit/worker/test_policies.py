"""Policies of every kind through a collector, and the heads of those that ship against torch.distributions."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from cormorant.policies import lstm, mlp
from cormorant_postproc import frames_of
from cormorant_testing.collecting import make_checker, make_collector
from cormorant_testing.envs import OBSERVATION_SPACES, Masked, MaskedAtTimes
from cormorant_worker.action_mask import ObservedActionMask, legal_action
from cormorant_worker.errors import PolicyError, PolicyLoadError, PolicyMismatch
from cormorant_worker.launch import make_collector as collector_of
from cormorant_worker.policy.actor import PolicyActor, wrap_policy
from cormorant_worker.policy.exploration import ExplorationType, exploring, is_greedy
from cormorant_worker.policy.networks import make_head
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import OneHot, Rooted, leaves

NUM_SAMPLES = 20_000


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ("raising", PolicyLoadError, "raised RuntimeError: no weights for this planet"),
        ("wrong_type", PolicyLoadError, "returned int; return a TensorDictModule"),
        ("no_such", PolicyLoadError, "has no attribute 'no_such'"),
        ("no.such.module:policy", PolicyLoadError, "cannot import the policy entrypoint no.such.module"),
        (
            "wrong_shape",
            PolicyMismatch,
            r"action is int64 of shape \(2, 5\), its space says int64 of shape \(2,\); return values of Discrete",
        ),
        ("floats", PolicyMismatch, "is float32 of shape .*, its space says int64"),
        ("in_place", PolicyMismatch, "changes its observations in place"),
        ("cormorant.policies:atari_cnn", PolicyLoadError, "expects one uint8 image .*; try mlp"),
    ],
)
def test_policy_for_other_spaces_is_refused_before_a_step(policy: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make_collector(policy=policy)


@pytest.mark.parametrize("factory", [mlp, lstm])
def test_the_dry_run_stays_within_the_observation_space(factory: Callable) -> None:
    space = spaces.Tuple((spaces.Discrete(3, start=5), spaces.Box(1.0, 2.0, (2,), np.float32)))
    models = wrap_policy(factory(space, spaces.Discrete(2)), "test")
    PolicyActor(models, space, spaces.Discrete(2), device=torch.device("cpu"))


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def box(policy: Callable, action: gymnasium.Space = BOX, **options: int) -> PolicyActor:
    return PolicyActor(wrap_policy(policy, "test"), BOX, action, device=torch.device("cpu"), **options)


def test_actions_of_a_row_may_be_whole_floats_or_squeezed() -> None:
    first = np.ones(1, np.bool_)
    actor = box(lambda obs: obs[:, 0].long().squeeze(), spaces.Discrete(3))
    assert actor.act((np.ones((1, 2), np.float32),), (), first).actions[0].tolist() == [1]
    actor = box(lambda obs: obs[:, 0] * 2 if len(obs) == 1 else torch.ones(len(obs)), spaces.Discrete(3))
    assert actor.act((np.ones((1, 2), np.float32),), (), first).actions[0].tolist() == [2]
    with pytest.raises(PolicyMismatch, match=r"float32 with 0\.5, the environment expects whole numbers"):
        actor.act((np.full((1, 2), 0.25, np.float32),), (), first)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_mapping_with_the_action_alone_is_asked_for_once(on_device: bool) -> None:
    calls = list[int]()
    actor = box(lambda obs: (calls.append(len(obs)), {"action": obs / 2})[1])
    calls.clear()
    obs, first = np.ones((3, 2), np.float32), np.ones(3, np.bool_)
    if on_device:
        (action,) = actor.act_tensors((torch.from_numpy(obs),), (), torch.from_numpy(first))
    else:
        (action,) = actor.act((obs,), (), first).actions
    assert (calls, action.tolist()) == ([3], [[0.5, 0.5]] * 3)


@pytest.mark.parametrize("is_output", [False, True])
def test_a_policy_that_answers_for_other_rows_is_refused(is_output: bool) -> None:
    def first_of_three(obs: torch.Tensor) -> Any:
        found = obs[:1] if len(obs) == 3 else obs.clone()
        return {"action": obs.clone(), "value": found} if is_output else found

    actor = box(first_of_three)
    with pytest.raises(PolicyMismatch, match=r"shape \(1, 2\) for 3 environments; the first dimension must be 3"):
        actor.act((np.zeros((3, 2), np.float32),), (), np.ones(3, np.bool_))


class Remembers(TensorDictModuleBase):
    """Carries "h", and cannot begin without."""

    in_keys = ("observation", "h")
    out_keys = ("action", ("next", "h"))

    def forward(self, tensordict: TensorDict) -> TensorDict:
        tensordict["next", "h"] = tensordict["h"] + 1
        return tensordict.set("action", tensordict["observation"].clone())


class BeginsElsewhere(Remembers):
    def initial_state(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {"hidden": torch.zeros(batch_size, 1)}


@pytest.mark.parametrize(
    ("policy", "action", "words"),
    [
        (
            lambda obs: {"action": obs.clone(), "extra": obs.to(torch.float8_e5m2)},
            BOX,
            r"extra is torch\.float8_e5m2, ",
        ),
        (lambda obs: obs + 0.5, OneHot(2), "; return values of OneHot"),
        (lambda obs: obs[:, 0].long(), OneHot(2), "; return values of OneHot"),
        (Remembers(), BOX, r"carries h from step to step .* give it a method initial_state\(batch_size\)"),
        (BeginsElsewhere(), BOX, r"initial_state\(1\) of the policy returned \['hidden'\] but not h"),
    ],
)
def test_what_cannot_be_stored_or_carried_is_refused(policy: Callable, action: gymnasium.Space, words: str) -> None:
    with pytest.raises((PolicyError, PolicyMismatch), match=words):
        box(policy, action)


@pytest.mark.parametrize(
    ("block", "action", "outputs", "states"),
    [
        (1, spaces.Box(-1, 1, (2,), np.float32), [(("action_log_prob",), ())], []),
        (2, spaces.Discrete(3), [], [(("hidden",), (32,))]),
    ],
)
def test_documented_policies_act(block: int, action: gymnasium.Space, outputs: list, states: list) -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/own-policy.md").read_text()
    found: dict = {}
    exec(text.split("```python\n")[block].split("```")[0], found)  # our own page
    actor = box(found["make_policy"](BOX, action), action)
    assert [(leaf.key, leaf.shape) for leaf in actor.outputs] == outputs
    assert [(leaf.key, leaf.shape) for leaf in actor.states] == states


def test_exploration_types_choose_or_draw() -> None:
    torch.manual_seed(0)
    head = make_head(spaces.Discrete(3))
    logits = torch.tensor([[0.0, 0.5, 0.2]]).repeat(200, 1)
    for greedy in (ExplorationType.MODE, ExplorationType.MEAN, ExplorationType.DETERMINISTIC):
        with exploring(greedy):
            assert is_greedy()
            assert head.act(logits).unique().tolist() == [1]
    with exploring(ExplorationType.RANDOM):
        assert not is_greedy()
        assert head.act(logits).unique().tolist() == [0, 1, 2]
    normal = make_head(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    with exploring(ExplorationType.MEAN):
        assert normal.act(torch.tensor([[1.0, 2.0, 9.0, 9.0]])).tolist() == [[1.0, 2.0]]


def test_a_lazy_module_that_acted_can_be_trained() -> None:
    policy = torch.nn.Sequential(torch.nn.LazyLinear(1), torch.nn.Tanh())
    with collector_of(env="Pendulum-v1", policy=policy, num_envs=2) as collector:
        collector.collect(num_steps=8)
    policy(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_only_a_greedy_collector_repeats_itself() -> None:
    def actions(exploration: str, seed: int) -> list[int]:
        collector = make_collector(policy="cormorant.policies:mlp", exploration=exploration)
        collector.rng.state = torch.Generator().manual_seed(seed).get_state()
        return collector.collect(num_steps=60)["action"].flatten().tolist()

    assert actions("mode", 1) == actions("mode", 2)
    assert actions("random", 1) != actions("random", 2)


ACTIONS = ("box", "discrete", "discrete_start", "multi_discrete")
OBSERVATIONS = sorted(set(OBSERVATION_SPACES) - {"discrete", "dict", "tuple", "multi_discrete", "nested"})


@pytest.mark.parametrize(
    "options", [*({"action": action} for action in ACTIONS), *({"observation": seen} for seen in OBSERVATIONS)], ids=str
)
@pytest.mark.parametrize("factory", ["mlp", "lstm"])
def test_shipped_policies_act(factory: str, options: dict[str, str]) -> None:
    policy = {"policy": f"cormorant.policies:{factory}", "policy_kwargs": {"return_log_prob": True}}
    collector = make_collector(**policy, **options, lengths=(3, 5))
    batch = collector.collect(num_steps=24)
    make_checker(**options, lengths=(3, 5)).take(batch)
    if factory == "mlp":
        flat = batch.flatten()
        logp, _ = collector.actor.models.acting.evaluate(flat["observation"], flat["action"])
        torch.testing.assert_close(logp, flat["action_log_prob"], atol=1e-6, rtol=1e-6)


HEADS = [
    spaces.Discrete(4), spaces.Discrete(3, start=10),
    spaces.MultiDiscrete([3, 2]), spaces.MultiDiscrete([3, 4], start=[5, -2]),
    spaces.Box(-np.inf, np.inf, (2,), np.float32),
]  # fmt: skip


def reference(space: gymnasium.Space, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy by torch.distributions."""
    d = torch.distributions
    if isinstance(space, spaces.Discrete):
        one = d.Categorical(logits=params)
        return one.log_prob(action - int(space.start)), one.entropy()
    if isinstance(space, spaces.MultiDiscrete):
        parts = [d.Categorical(logits=p) for p in torch.split(params, space.nvec.tolist(), -1)]
        index = action - torch.as_tensor(space.start)
        return sum(p.log_prob(index[:, i]) for i, p in enumerate(parts)), sum(p.entropy() for p in parts)
    loc, log_std = params.chunk(2, -1)
    normal = d.Normal(loc, log_std.exp())
    return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)


@pytest.mark.parametrize("space", HEADS, ids=str)
def test_log_probabilities_and_entropies_are_those_of_torch(space: gymnasium.Space) -> None:
    torch.manual_seed(1)
    head = make_head(space)
    params = torch.randn(64, head.num_params)
    action = head.act(params)
    assert all(space.contains(a.numpy().astype(space.dtype)) or isinstance(space, spaces.Box) for a in action)
    logp, entropy = reference(space, params, action)
    torch.testing.assert_close(head.log_prob(params, action), logp, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(head.entropy(params), entropy, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("space", HEADS[:4], ids=str)
def test_drawn_frequencies_are_the_probabilities(space: gymnasium.Space) -> None:
    torch.manual_seed(2)
    head = make_head(space)
    params = torch.randn(1, head.num_params)
    drawn = head.act(params.repeat(NUM_SAMPLES, 1)).reshape(NUM_SAMPLES, -1).numpy()
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    shaped = torch.as_tensor(kinds).reshape(len(kinds), *(space.shape or ()))
    probabilities = head.log_prob(params.repeat(len(kinds), 1), shaped).exp().numpy()
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-4)  # every kind was drawn
    expected = probabilities / probabilities.sum() * counts.sum()
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_normal_draws_have_their_mean_and_deviation() -> None:
    torch.manual_seed(3)
    head = make_head(HEADS[-1])
    params = torch.tensor([[1.0, -2.0, math.log(0.5), math.log(2.0)]])
    drawn = head.act(params.repeat(NUM_SAMPLES, 1))
    assert drawn.mean(0).tolist() == pytest.approx([1.0, -2.0], abs=5 * 2.0 / math.sqrt(NUM_SAMPLES))
    assert drawn.std(0).tolist() == pytest.approx([0.5, 2.0], rel=0.03)


@pytest.mark.parametrize(
    "space",
    [
        *HEADS[:4], spaces.MultiBinary(3), spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.Box(-2.0, 3.0, (3,), np.float32),
        spaces.Box(np.array([0.0, -np.inf, -np.inf, -1.0]), np.array([np.inf, 0.0, np.inf, 1.0]), dtype=np.float64),
    ],
    ids=str,
)  # fmt: skip
def test_random_actions_are_gymnasiums_and_reproducible(space: gymnasium.Space) -> None:
    n = 4000
    obs, init = (np.zeros((n, 1)),), np.zeros(n, np.bool_)
    (drawn,) = RandomActor(space, 1).act(obs, (), init).actions
    (again,) = RandomActor(space, 1).act(obs, (), init).actions
    (other,) = RandomActor(space, 2).act(obs, (), init).actions
    (leaf,) = leaves(space, ("action",))
    assert (drawn.shape, drawn.dtype) == ((n, *leaf.shape), leaf.dtype)
    assert (drawn == again).all()
    assert (drawn != other).any()
    assert all(space.contains(a) for a in drawn[:200]) or not leaf.shape
    space.seed(3)
    theirs = np.stack([space.sample() for _ in range(n)]).astype(np.float64)
    ours = drawn.astype(np.float64)
    error = 6 * theirs.std(0) / math.sqrt(n) + 1e-9
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < error).all()
    assert (np.abs(ours.std(0) - theirs.std(0)) < 0.1 * theirs.std(0) + 1e-9).all()


# -- recurrent -------------------------------------------------------------------------------------------------

STATES = ("recurrent_state_h", "recurrent_state_c")


def test_lstm_states_are_carried_reset_and_replayed_bit_by_bit() -> None:
    options = {"lengths": (3, 1, 5), "policy": "cormorant.policies:lstm", "policy_kwargs": {"hidden": 8}}
    collector = make_collector(**options)
    states: dict[str, torch.Tensor] = {}
    for _ in range(3):
        batch = collector.collect(num_steps=21)
        states = states or {key: batch[key][:, 0] for key in STATES}
        for t in range(batch.shape[1]):
            given = {"observation": batch["observation"][:, t], "is_init": batch["is_init"][:, t], **states}
            with torch.inference_mode():
                out = collector.actor.models.acting(TensorDict(given, batch_size=[3]))
            for key in STATES:
                # What the last step left, or zero after an end.
                assert torch.equal(batch[key][:, t], torch.where(batch["is_init"][:, t], 0.0, states[key]))
                assert torch.equal(batch["next", key][:, t], out["next", key])
            states = {key: out["next", key].clone() for key in STATES}


# -- action masks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_info", [False, True])
@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
@pytest.mark.parametrize("warmup", [False, True])
def test_random_frames_and_probes_take_legal_actions_only(*, warmup: bool, vectorization: Any, in_info: bool) -> None:
    collection = {"initRandomFrames": 300, "resetAtEachBatch": True} if warmup else {"maxFramesPerTrajectory": 7}
    with collector_of(
        env=partial(Masked, in_info=in_info),
        policy="cormorant.policies:mlp" if warmup else None,
        num_envs=3,
        vectorization_mode=vectorization,
        info=["chosen"],
        collection=collection,
    ) as collector:
        batches = [collector.collect(num_steps=num_steps) for num_steps in (100, 200)]
        assert collector.env_restarts == 0
    frames = [frames_of(batch) for batch in batches]
    assert set(torch.cat([part["action"] for part in frames]).tolist()) == {10, 11, 12, 13, 14}
    for part in frames:
        assert torch.equal(part["next", "info", "chosen"], part["action"])


@pytest.mark.parametrize("seed", range(4))
def test_agents_are_probed_with_legal_actions(seed: int) -> None:
    acts = {"red": spaces.MultiDiscrete([3, 3]), "blue": spaces.Box(-1, 1, (1, 2))}
    obs = {"red": {"action_mask": [np.array([0, 0, 1]), np.array([1, 0, 0])]}, "blue": {"action_mask": []}}
    action = legal_action(Rooted({g: spaces.Dict({"action": a}) for g, a in acts.items()}), obs, {}, seed=seed)
    assert action["red"]["action"].tolist() == [2, 0]
    assert action["blue"]["action"] in acts["blue"]


def test_a_mask_in_info_reaches_the_observation() -> None:
    with collector_of(env=lambda: ObservedActionMask(Masked(in_info=True)), num_envs=2, info=["chosen"]) as collector:
        batch = collector.collect(num_steps=200)
        assert collector.env_restarts == 0
    legal = batch["observation", "action_mask"].gather(-1, (batch["action"] - 10).unsqueeze(-1))
    assert bool((legal == 1).all())


@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
def test_a_restored_collector_keeps_to_the_masks_of_the_info(vectorization: Any) -> None:
    with collector_of(env=MaskedAtTimes, num_envs=3, vectorization_mode=vectorization) as collector:
        collector.collect(num_steps=11)
        state = collector.state()
        first = collector.collect(num_steps=91)
        collector.restore(state)
        again = collector.collect(num_steps=91)
        assert collector.env_restarts == 0
    assert torch.equal(first["action"], again["action"])
    assert len(frames_of(first)["action"].unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("space", "mask", "legal"),
    [
        (spaces.Discrete(4), [0, 1, 0, 1], {(1,), (3,)}),
        (spaces.Discrete(3, start=-1), [0, 0, 1], {(1,)}),
        (spaces.Discrete(3, start=7), [0, 0, 0], {(7,)}),  # as gymnasium's sample
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1], {(0, 1), (0, 2)}),
        (spaces.MultiDiscrete([[2], [2]]), [1, 1, 0, 1], {(0, 1), (1, 1)}),
        (spaces.Discrete(3), [0, 1], {(0,), (1,), (2,)}),  # of another length: something else
    ],
    ids=str,
)
def test_masked_actions_are_uniform_over_legal_ones(space: Any, mask: list[int], legal: set[Any]) -> None:
    n = 4000
    masks = np.tile(np.array(mask, np.int8), (n, 1))
    observation = spaces.Dict(action_mask=spaces.MultiBinary(len(mask)), pos=spaces.Box(0, 1, (2,)))
    actor = RandomActor(space, 1, observation=observation)
    (drawn,) = actor.act((masks, np.zeros((n, 2), np.float32)), (), np.zeros(n, np.bool_)).actions
    assert (drawn.shape, drawn.dtype) == ((n, *space.shape), space.dtype)
    found, counts = np.unique(drawn.reshape(n, -1), axis=0, return_counts=True)
    assert set(map(tuple, found.tolist())) == legal
    assert (abs(counts - n / len(legal)) < 6 * np.sqrt(n)).all()
