"""`policy.compile` and `policy.dtype`: the same actions from the same streams, faster; the policy itself where not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from structlog.testing import capture_logs
from torch import nn

from cormorant.policies import ActionHeads, atari_cnn, lstm, mlp
from cormorant_worker.collect.build import build_policy
from cormorant_worker.collect.overrides import NO_OVERRIDES
from cormorant_worker.launch import load_job
from cormorant_worker.policy import compiled
from cormorant_worker.policy.actor import PolicyActor, wrap_policy
from cormorant_worker.policy.compiled import compile_actor, in_dtype
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.policy.networks import CategoricalHead, gumbel_argmax
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights, tensors_of
from manifest_making import manifest

CPU = torch.device("cpu")
BOX = spaces.Box(-np.inf, np.inf, (5,), np.float32)
PIXELS = spaces.Box(0, 255, (4, 36, 36), np.uint8)
ACTIONS = {"discrete": spaces.Discrete(3, start=2), "box": spaces.Box(-1.0, 1.0, (2,), np.float32)}


def actor_of(policy: Any, action: Any = ACTIONS["discrete"]) -> PolicyActor:
    return PolicyActor(wrap_policy(policy, "test"), BOX, action, device=CPU)


def tried(actor: PolicyActor, *, exploration: str = "random", space: spaces.Box = BOX) -> str:
    return compile_actor(actor, space, mode="auto", num_rows=4, exploration=ExplorationType(exploration))


def acts(actor: PolicyActor, obs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    n = len(obs[0])
    states = tuple(np.repeat(value, n, axis=0) for value in actor.initial_states)
    torch.manual_seed(11)
    with torch.inference_mode(), exploring(ExplorationType.RANDOM):
        acted = actor.act(obs, states, np.zeros(n, np.bool_))
    return [a.copy() for arrays in acted[:3] for a in arrays]


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)


@pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.MODE])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_one_categorical_action_is_drawn_exactly(exploration: ExplorationType, activation: Any) -> None:
    policy = mlp(BOX, ACTIONS["discrete"], activation=activation)
    eager, fast = actor_of(policy), actor_of(policy)
    assert tried(fast, exploration=exploration) == "layers"
    assert fast.models.acting is not policy
    published = mlp(BOX, ACTIONS["discrete"])
    nn.init.normal_(published.heads.linear.weight)
    weights = StagedWeights({"policy": policy})
    weights.offer({"policy": tensors_of(published)}, version=PolicyVersion(3))
    assert weights.apply() == 3
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
    def act(self, params: torch.Tensor) -> torch.Tensor:
        return super().act(params.clamp(-40, 40))


def clamp(owner: Any, name: str, bound: float) -> None:
    theirs = getattr(owner, name)
    setattr(owner, name, lambda x: theirs(x.clamp(-bound, bound)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda policy: clamp(policy, "forward", 6),
    "params": lambda policy: clamp(policy, "params", 6),
    "hook": lambda policy: policy.register_forward_pre_hook(lambda module, given: (given[0].clamp(-6, 6),)),
    "act of heads": lambda policy: clamp(policy.heads, "act", 40),
    "encoder": lambda policy: clamp(policy.encoder, "forward", 6),
    "class of a head": lambda policy: setattr(policy.heads, "head", AlmostHead(ACTIONS["discrete"])),
    "class of heads": lambda policy: setattr(policy, "heads", AlmostHeads(64, ACTIONS["discrete"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_is_not_called_whole(change: str) -> None:
    policy = mlp(BOX, ACTIONS["discrete"], activation="relu")
    CHANGES[change](policy)
    nn.init.normal_(policy.heads.linear.weight, std=5)
    eager, fast = actor_of(policy), actor_of(policy)
    tried(fast)
    large = (50 * rows(64),)  # random observations of a trial are not clipped
    np.testing.assert_array_equal(acts(fast, large), acts(eager, large))


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda acting: lambda obs: acting(obs) + 2e-5, "its results differ from the policy's by up to 2e-05"),
        (lambda acting: lambda obs: (torch.rand(1), acting(obs))[1], "it draws other random numbers than the policy"),
        (lambda acting: lambda obs: 7 - acting(obs), "its results differ from the policy's by up to 3"),
        (lambda acting: lambda obs: 1 // 0, "it raised ZeroDivisionError: integer"),
    ],
)
def test_a_wrong_candidate_is_refused_with_its_reason(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "called_whole", change)
    is_box = "e-05" in reason
    policy = nn.Sequential(nn.Linear(5, 2), nn.Tanh()) if is_box else mlp(BOX, ACTIONS["discrete"])
    actor = actor_of(policy, action=ACTIONS["box" if is_box else "discrete"])
    eager = actor.models.acting
    with capture_logs() as logs:
        assert tried(actor) == "eager"
    assert actor.models.acting is eager
    assert [line["event"] for line in logs] == ["policy_not_compiled", "policy_compiled"]
    assert reason in logs[0]["reason"]


def test_trials_leave_streams_and_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.body(observation) + torch.rand(1)

    monkeypatch.setattr(compiled, "called_whole", lambda acting: acting)
    policy = Counting()
    actor = actor_of(policy, action=ACTIONS["box"])
    calls, state = float(policy.calls), torch.get_rng_state()
    assert tried(actor) == "layers"
    assert float(policy.calls) == calls
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("factory", "space"), [(mlp, BOX), (lstm, BOX), (atari_cnn, PIXELS)])
def test_bfloat16_layers_give_float32_log_probabilities(factory: Any, space: spaces.Box) -> None:
    torch.manual_seed(0)
    policy = factory(space, ACTIONS["discrete"], return_log_prob=True)
    drawn = np.random.default_rng(0)
    given = (rows(16) if space is BOX else drawn.integers(256, size=(16, *space.shape), dtype=np.uint8),)
    exact = acts(PolicyActor(wrap_policy(policy, "test"), space, ACTIONS["discrete"], device=CPU), given)
    models = in_dtype(wrap_policy(policy, "test"), "bfloat16", CPU)
    actor = PolicyActor(models, space, ACTIONS["discrete"], device=CPU)
    assert tried(actor, space=space) == "eager"  # layers are for float32
    found = acts(actor, given)
    assert [leaf.dtype for leaf in actor.outputs] == [np.float32]
    assert not np.array_equal(found[1], exact[1])
    # Normalized in float32: what bfloat16 rounds is the logits.
    np.testing.assert_allclose(found[1], exact[1], atol=5e-3)


@pytest.mark.parametrize("is_server", [False, True])
def test_servers_do_not_try_torch_compile(is_server: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda acting, **_: asked.append(acting) or acting)
    policy = {"entrypoint": "cormorant.policies:mlp", "compile": "on", "kwargs": {"return_log_prob": True}}
    job = load_job(manifest(policy=policy))
    build_policy(job, NO_OVERRIDES, BOX, ACTIONS["discrete"], None, device=CPU, num_rows=4, is_server=is_server)
    assert len(asked) == (not is_server)
