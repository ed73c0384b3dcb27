"""Random numbers of rows at an inference server: right distributions, and independent of the rows beside them."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from cormorant_worker.inference.row_noise import RowNoise
from cormorant_worker.policy.zoo import atari_cnn, lstm, mlp

N = 40_000
WORDS = np.random.default_rng(5).integers(0, 2**63, N).astype(np.uint64)
THIRD = torch.full((N,), 1 / 3)
LOGITS = torch.tensor([0.2, 0.3, 0.5]).log().expand(N, 3)

DRAWS: dict[str, tuple[Callable[[int], torch.Tensor], float, float]] = {
    "rand": (torch.rand, 0.5, 12**-0.5),
    "rand-2d": (lambda n: torch.rand((n, 3)), 0.5, 12**-0.5),
    "rand_like": (lambda n: torch.rand_like(THIRD[:n]), 0.5, 12**-0.5),
    "randn": (lambda n: torch.randn(n, 2), 0.0, 1.0),
    "randn_like": (lambda n: torch.randn_like(THIRD[:n]), 0.0, 1.0),
    "randint": (lambda n: torch.randint(2, 7, (n,)).float(), 4.0, 2**0.5),
    "randint-high": (lambda n: torch.randint(5, (n,)).float(), 2.0, 2**0.5),
    "normal": (lambda n: torch.normal(THIRD[:n], 2.0), 1 / 3, 2.0),
    "bernoulli": (lambda n: torch.bernoulli(THIRD[:n]), 1 / 3, (2 / 9) ** 0.5),
    "exponential_": (lambda n: torch.empty(n, 2).exponential_(), 1.0, 1.0),
    "uniform_": (lambda n: torch.empty(n).uniform_(-1, 1), 0.0, 3**-0.5),
    "normal_": (lambda n: torch.empty(n).normal_(1.0, 0.5), 1.0, 0.5),
    "bernoulli_": (lambda n: torch.empty(n).bernoulli_(0.5), 0.5, 0.5),
    "Categorical": (lambda n: torch.distributions.Categorical(logits=LOGITS[:n]).sample().float(), 1.3, 0.61**0.5),
    "Normal": (lambda n: torch.distributions.Normal(THIRD[:n], THIRD[:n] * 3).rsample(), 1 / 3, 1.0),
    "Bernoulli": (lambda n: torch.distributions.Bernoulli(THIRD[:n]).sample(), 1 / 3, (2 / 9) ** 0.5),
}


def drawn(draw: Callable[[int], Any], words: np.ndarray[Any, Any]) -> Any:
    noise = RowNoise()
    noise.begin(words)
    with noise:
        return draw(len(words))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution_and_belong_to_their_row(name: str) -> None:
    draw, mean, std = DRAWS[name]
    before = torch.random.get_rng_state()
    values = drawn(draw, WORDS)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert values.mean().item() == pytest.approx(mean, abs=5 * std / N**0.5)
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert torch.equal(drawn(draw, WORDS[:7]), values[:7])
    assert torch.equal(drawn(draw, np.concatenate([WORDS[3:5], WORDS[:1]])), values[[3, 4, 0]])


def test_two_draws_of_one_act_differ() -> None:
    first, second = drawn(lambda n: (torch.rand(n), torch.rand(n)), WORDS)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_draws_of_other_sizes_use_torchs_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(11)
    torch.manual_seed(3)
    assert torch.equal(drawn(lambda _: torch.rand(11), WORDS), expected)


@pytest.mark.parametrize(
    ("factory", "space"),
    [
        (mlp, gymnasium.spaces.Box(-1, 1, (5,), np.float32)),
        (atari_cnn, gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8)),
        (lstm, gymnasium.spaces.Box(-1, 1, (5,), np.float32)),
    ],
)
def test_built_in_policies_act_by_row(factory: Any, space: gymnasium.spaces.Box) -> None:
    from tensordict import TensorDict

    policy = factory(space, gymnasium.spaces.Discrete(4))
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(16)]))

    def act(rows: torch.Tensor) -> torch.Tensor:
        if factory is not lstm:
            return policy(rows)
        n = len(rows)
        given = {"observation": rows, "is_init": torch.ones(n, 1, dtype=torch.bool), **policy.initial_state(n)}
        return policy(TensorDict(given, [n]))["action"]

    with torch.no_grad():
        together = drawn(lambda n: act(obs[:n]), WORDS[:16])
        alone = [drawn(lambda n, i=i: act(obs[i : i + 1]), WORDS[i : i + 1]) for i in range(16)]
    assert torch.equal(torch.cat(alone), together)
    assert len(set(together.tolist())) > 1
