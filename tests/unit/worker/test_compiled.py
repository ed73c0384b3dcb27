"""`policy.compile` and `policy.dtype`: the same actions from the same streams, faster; the policy itself where not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from structlog.testing import capture_logs
from tensordict.nn import TensorDictModule
from torch import nn

from cormorant.policies import ActionHeads, lstm, mlp
from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.build import build_collector, build_policy
from cormorant_worker.collect.overrides import NO_OVERRIDES
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.policy import compiled
from cormorant_worker.policy.actor import PolicyActor
from cormorant_worker.policy.compiled import compile_actor, in_dtype
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.policy.loading import wrap_policy
from cormorant_worker.policy.networks import CategoricalHead, gumbel_argmax
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights, tensors_of

CPU = torch.device("cpu")
BOX = spaces.Box(-np.inf, np.inf, (5,), np.float32)
ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "multi": spaces.MultiDiscrete([2, 4]),
    "bits": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "nested": spaces.Dict({"turn": spaces.Box(-1.0, 1.0, (2,), np.float32), "fire": spaces.Discrete(2)}),
}


@pytest.fixture(autouse=True)
def fastest_by_decree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which candidate is right does not depend on the speed of this machine."""
    monkeypatch.setattr(compiled, "_ROUND_S", 0.0)
    monkeypatch.setattr(compiled, "_WORTH", 1e6)


def actor_of(policy: Any, observation: Any = BOX, action: Any = ACTIONS["discrete"]) -> PolicyActor:
    return PolicyActor(wrap_policy(policy, "test"), observation, action, device=CPU)


def tried(actor: PolicyActor, observation: Any = BOX, n: int = 4, exploration: str = "random") -> compiled.CompileTrial:
    return compile_actor(actor, observation, mode="auto", num_rows=n, exploration=ExplorationType(exploration))


def acts(actor: PolicyActor, obs: tuple[np.ndarray, ...], *, seed: int = 11) -> list[np.ndarray]:
    n = len(obs[0])
    states = tuple(np.repeat(value, n, axis=0) for value in actor.initial_states)
    torch.manual_seed(seed)
    with torch.inference_mode(), exploring(ExplorationType.RANDOM):
        acted = actor.act(obs, states, np.zeros(n, np.bool_))
    return [a.copy() for arrays in acted[:3] for a in arrays]


def rows(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, *(shape or (5,)))).astype(np.float32)


def assert_same(eager: PolicyActor, fast: PolicyActor, *obs: np.ndarray, tolerance: float = 1e-5) -> None:
    """Whole numbers exactly; other outputs within the tolerance."""
    for expected, found in zip(acts(eager, obs), acts(fast, obs), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if found.dtype.kind != "f" or not tolerance:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_layers_draw_the_same_actions_for_every_action_space(kind: str, activation: str) -> None:
    torch.manual_seed(0)
    policy = mlp(BOX, ACTIONS[kind], activation=activation, return_log_prob=True)
    eager, fast = actor_of(policy, action=ACTIONS[kind]), actor_of(policy, action=ACTIONS[kind])
    assert tried(fast).chosen == "layers"
    for n in (4, 1, 64):
        assert_same(eager, fast, rows(n), tolerance=0 if activation == "relu" else 1e-5)


@pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.MODE])
def test_one_categorical_action_is_drawn_exactly(exploration: ExplorationType) -> None:
    policy = mlp(BOX, ACTIONS["discrete"], activation="relu")
    eager, fast = actor_of(policy), actor_of(policy)
    assert tried(fast).chosen == "layers"
    assert fast.models.acting is not policy
    nn.init.normal_(policy.heads.linear.weight)  # as published weights do
    for n in (4, 1, 64):
        drawn = []
        for actor in (eager, fast):
            torch.manual_seed(n)
            with torch.inference_mode(), exploring(exploration):
                actions = actor.act((rows(n),), (), np.zeros(n, np.bool_)).actions[0]
            drawn.append((actions.dtype, actions.tolist(), torch.get_rng_state().tolist()))
        assert drawn[0] == drawn[1]


class AlmostHead(CategoricalHead):
    def act(self, params: torch.Tensor) -> torch.Tensor:
        return super().act(params.clamp(-40, 40))


class AlmostHeads(ActionHeads):
    def act(self, params: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        return super().act(params.clamp(-40, 40))


class OwnHeads(nn.Module):
    """Has what a policy asks of its heads, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.log_std = nn.Linear(64, 3), None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features)

    def act(self, params: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        drawn = CategoricalHead(ACTIONS["discrete"]).act(params.clamp(-40, 40))
        return drawn, [drawn]


def clamp(owner: Any, name: str, bound: float) -> None:
    theirs = getattr(owner, name)
    setattr(owner, name, lambda x: theirs(x.clamp(-bound, bound)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda policy: clamp(policy, "forward", 6),
    "params": lambda policy: clamp(policy, "params", 6),
    "hook": lambda policy: policy.register_forward_pre_hook(lambda module, given: (given[0].clamp(-6, 6),)),
    "act of heads": lambda policy: clamp(policy.heads, "act", 40),
    "encoder": lambda policy: clamp(policy.encoder, "forward", 6),
    "class of a head": lambda policy: policy.heads._heads.__setitem__(0, AlmostHead(ACTIONS["discrete"])),
    "class of heads": lambda policy: setattr(policy, "heads", AlmostHeads(64, ACTIONS["discrete"])),
    "own heads": lambda policy: setattr(policy, "heads", OwnHeads()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_is_not_called_whole(change: str) -> None:
    policy = mlp(BOX, ACTIONS["discrete"], activation="relu")
    CHANGES[change](policy)
    nn.init.normal_(policy.heads.linear.weight, std=5)
    eager, fast = actor_of(policy), actor_of(policy)
    tried(fast)
    assert_same(eager, fast, 50 * rows(64), tolerance=0)  # random observations of a trial are not clipped
    assert (change in policy.__dict__) == (change in ("forward", "params"))


@pytest.mark.parametrize("grad", [True, False])
def test_a_policy_called_whole_asks_its_modules_where_it_must(grad: bool) -> None:
    policy = mlp(BOX, ACTIONS["discrete"])
    fast = actor_of(policy)
    tried(fast)
    seen = []
    policy.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=not grad):
        fast.models.acting(torch.from_numpy(rows(4)))
    assert len(seen) == 1


def test_actions_drawn_in_numpy_are_those_of_torch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(20_000, 3)
    noise = torch.empty_like(logits).exponential_()
    scores = logits - noise.log()
    best = scores.topk(2).values
    sure = (best[:, 0] - best[:, 1] > 1e-5).numpy()
    assert sure.mean() > 0.999
    found = gumbel_argmax(logits.numpy(), noise.numpy())
    np.testing.assert_array_equal(found[sure], scores.argmax(-1).numpy()[sure])


def test_published_weights_act_in_the_compiled_policy_exactly() -> None:
    policy = mlp(BOX, ACTIONS["box"], activation="relu")
    fast, weights = actor_of(policy, action=ACTIONS["box"]), StagedWeights({"policy": policy})
    assert tried(fast).chosen == "layers"
    before = acts(fast, (rows(8),))[0]
    torch.manual_seed(99)
    published = mlp(BOX, ACTIONS["box"], activation="relu")
    weights.offer({"policy": tensors_of(published)}, version=PolicyVersion(3))
    assert weights.apply() == 3
    np.testing.assert_array_equal(
        acts(fast, (rows(8),))[0], acts(actor_of(published, action=ACTIONS["box"]), (rows(8),))[0]
    )
    assert not np.array_equal(before, acts(fast, (rows(8),))[0])


def test_nested_observations_and_recurrent_policies_compile() -> None:
    nested = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1.0, 1.0, (2, 2), np.float32)})
    for factory in (mlp, lstm):
        policy = factory(nested, ACTIONS["discrete"], return_log_prob=True)
        eager, fast = (actor_of(policy, nested) for _ in range(2))
        assert tried(fast, nested).chosen == "layers"
        obs = (np.array([0, 2, 1, 0]), rows(4, 2, 2))
        assert_same(eager, fast, *obs)


def test_a_users_layers_compile_within_any_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3), nn.Identity())

        def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.body(observation)
            return {"action": 2 + torch.multinomial(logits.softmax(-1), 1)[:, 0], "logits": logits}

    own = Own()
    policies = own, TensorDictModule(nn.Sequential(nn.Linear(5, 2), nn.Tanh()), ["observation"], ["action"])
    for policy, action in zip(policies, (ACTIONS["discrete"], ACTIONS["box"]), strict=True):
        eager, fast = (actor_of(policy, action=action) for _ in range(2))
        assert tried(fast).chosen == "layers"
        assert_same(eager, fast, rows(6))
    # A learner in this process finds its module as it made it.
    own(torch.zeros(2, 5))["logits"].sum().backward()
    assert own.body[0].weight.grad is not None
    assert "forward" not in own.body.__dict__


def test_actions_are_new_memory_in_every_step() -> None:
    fast = actor_of(nn.Sequential(nn.Linear(5, 2), nn.Tanh()), action=ACTIONS["box"])
    assert tried(fast).chosen == "layers"
    with torch.inference_mode():
        first = fast.act((rows(4),), (), np.zeros(4, np.bool_)).actions[0]
        kept = first.copy()
        fast.act((-rows(4),), (), np.zeros(4, np.bool_))
    np.testing.assert_array_equal(first, kept)


def test_layers_that_are_not_plain_stay_as_they_are() -> None:
    hooked = nn.Sequential(nn.Linear(5, 2), nn.Tanh())
    hooked[0].register_forward_hook(lambda module, given, out: out * 2)
    within = nn.Sequential(nn.Sequential(nn.Linear(5, 2), nn.Tanh()), nn.Tanh())
    within[0].register_forward_hook(lambda module, given, out: out.clamp(-0.99, 0.99))
    strange = nn.Sequential(nn.Linear(5, 2), nn.GELU())
    double = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    for policy in (hooked, within, strange, double):
        assert tried(actor_of(policy, action=ACTIONS["box"])).chosen == "eager"


@pytest.mark.parametrize("depth", [0, 1])
def test_layers_whose_forward_was_replaced_keep_theirs(depth: int) -> None:
    policy = nn.Sequential(nn.Linear(5, 2), nn.Tanh())
    changed = policy[0] if depth else policy
    theirs = changed.forward
    changed.forward = lambda x: theirs(x.clamp(-6, 6))  # random observations of a trial do not show it
    actor = actor_of(policy, action=ACTIONS["box"])
    assert tried(actor).chosen == "eager"
    large = 50 * rows(4)
    np.testing.assert_array_equal(acts(actor, (large,))[0], acts(actor, (large.clip(-6, 6),))[0])


def test_layers_act_in_bfloat16_under_autocast() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).argmax(-1) + 2

    torch.manual_seed(0)
    policy = Greedy()
    actors = [actor_of(policy)]
    for _ in range(2):
        module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
        actors.append(
            PolicyActor(in_dtype(wrap_policy(module, "test"), "bfloat16", CPU), BOX, ACTIONS["discrete"], device=CPU)
        )
    tried(actors[2])
    exact, expected, found = (acts(actor, (rows(4096),))[0] for actor in actors)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, exact)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda acting: lambda obs: acting(obs) + 2e-5, "it differs from the policy by up to 2e-05"),
        (lambda acting: lambda obs: (torch.rand(1), acting(obs))[1], "it draws other random numbers than the policy"),
        (lambda acting: lambda obs: 7 - acting(obs), "whole numbers differ from the policy's"),
        (lambda acting: lambda obs: 1 // 0, "it raised ZeroDivisionError: integer"),
    ],
)
def test_a_wrong_candidate_is_refused_with_its_reason(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "with_stacks", change)
    is_box = "differs from" in reason
    policy = nn.Sequential(nn.Linear(5, 2), nn.Tanh()) if is_box else mlp(BOX, ACTIONS["discrete"])
    actor = actor_of(policy, action=ACTIONS["box" if is_box else "discrete"])
    eager = actor.models.acting
    with capture_logs() as logs:
        found = tried(actor)
    assert found.chosen == "eager"
    assert reason in found.refused["layers"]
    assert actor.models.acting is eager
    assert [line["event"] for line in logs] == ["policy_not_compiled", "policy_compiled"]


def test_a_slower_candidate_does_not_act(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_WORTH", 1e-6)
    assert tried(actor_of(mlp(BOX, ACTIONS["discrete"]))).chosen == "eager"


def test_calibration_leaves_streams_and_buffers_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 2), nn.Tanh())
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.body(observation) + torch.rand(1)

    policy = Counting()
    actor = actor_of(policy, action=ACTIONS["box"])
    calls, state = float(policy.calls), torch.get_rng_state()
    assert tried(actor).chosen == "layers"
    assert float(policy.calls) == calls
    assert torch.equal(torch.get_rng_state(), state)


def test_the_policy_is_compiled_for_the_exploration_in_force() -> None:
    actor = actor_of(mlp(BOX, ACTIONS["discrete"]))
    assert tried(actor, exploration="mode").chosen == "layers"


@pytest.mark.parametrize("factory", [mlp, lstm])
def test_bfloat16_layers_give_float32_log_probabilities(factory: Any) -> None:
    torch.manual_seed(0)
    policy = factory(BOX, ACTIONS["discrete"], return_log_prob=True)
    exact = acts(actor_of(policy), (rows(16),))
    models = in_dtype(wrap_policy(policy, "test"), "bfloat16", CPU)
    actor = PolicyActor(models, BOX, ACTIONS["discrete"], device=CPU)
    found = acts(actor, (rows(16),))
    assert [leaf.dtype for leaf in actor.outputs] == [np.float32]
    assert not np.array_equal(found[1], exact[1])
    # Normalized in float32: what bfloat16 rounds is the logits.
    np.testing.assert_allclose(found[1], exact[1], atol=5e-3)


def job(**policy: Any) -> CollectorJob:
    spec = {
        "env": {"gymnasium": {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": 4}},
        "policy": {"entrypoint": "cormorant.policies:mlp", "kwargs": {"activation": "relu"}, **policy},
        "collection": {"framesPerBatch": 64, "seed": 5},
        "output": {"queue": {"capacityBatches": 2}},
    }
    return CollectorJob.model_validate(
        {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "metadata": {"name": "c"}, "spec": spec}
    )


def test_a_compiled_collection_is_the_same_frame_by_frame() -> None:
    batches = []
    for mode in ("off", "auto"):
        with build_collector(job(compile=mode), WorkerPlace(seed=5)).collector as collector:
            batches.append(collector.collect(num_steps=256))
    for key, value in batches[0].items(include_nested=True, leaves_only=True):
        assert torch.equal(value, batches[1][key]), key


@pytest.mark.parametrize("is_server", [False, True])
def test_servers_do_not_try_torch_compile(is_server: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda acting, **_: asked.append(acting) or acting)
    observation, action = BOX, ACTIONS["discrete"]
    build_policy(
        job(compile="on"), NO_OVERRIDES, observation, action, None, device=CPU, num_rows=4, is_server=is_server
    )
    assert len(asked) == (not is_server)


@pytest.mark.slow
def test_without_a_compiler_the_layers_act(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/nonexistent/g++",))
    actor = actor_of(mlp(BOX, ACTIONS["discrete"]))
    with capture_logs() as logs:
        found = compile_actor(actor, BOX, mode="on", num_rows=4, exploration=ExplorationType.RANDOM)
    assert found.chosen == "layers"
    assert "InvalidCxxCompiler" in found.refused["torch.compile"]
    assert [line["event"] for line in logs] == ["policy_not_compiled", "policy_compiled"]


def test_what_a_trial_found_is_one_sentence() -> None:
    def told(chosen: str, seconds: dict[str, float], **refused: str) -> str:
        trial = compiled.CompileTrial(chosen=chosen, seconds_per_act=seconds, refused=refused, startup_seconds=1.25)
        return str(trial)

    times = {"eager": 51e-6, "layers": 34e-6}
    assert told("layers", times) == "layers: 34 us an act, 1.50 times as fast as eager; tried for 1.2 s"
    assert told("eager", times) == "eager: 51 us an act; tried for 1.2 s"
    assert told("eager", {}, layers="it raised E: no") == "eager: layers: it raised E: no; tried for 1.2 s"
    assert told("eager", {}) == "eager: no faster way is known; tried for 1.2 s"
