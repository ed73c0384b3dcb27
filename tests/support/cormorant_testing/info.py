"""What CountingEnvs' info must be in a batch, told by their true following observations."""

from typing import Any

import torch
from tensordict import TensorDict

INFO = (
    {"key": "step"},
    {"key": "even", "dtype": "bool"},
    {"key": "nested.echo", "dtype": "float32"},
    {"key": "pair"},
    {"key": "success", "dtype": "bool", "shape": []},
    {"key": "absent", "dtype": "float64", "shape": [2]},
    {"key": "never", "dtype": "int8", "shape": [], "fill": -1},
)
"""Complete and incomplete, nested, with a shape, at ends only, and never there."""

METRICS = (
    {"name": "success", "key": "success"},
    {"name": "steps", "key": "step", "reduce": "sum"},
    {"name": "mean_step", "key": "step", "reduce": "mean"},
    {"name": "longest", "key": "step", "reduce": "max"},
    {"name": "any_even", "key": "even", "reduce": "any"},
)


def expected_info(following: torch.Tensor, ended: torch.Tensor) -> dict[str, torch.Tensor]:
    """By key.

    Args:
        following: [..., 4] ident, episode, step, echo: the true following observations.
        ended: [...] bool.
    """
    _, episode, step, echo = following.unbind(-1)
    shape = step.shape
    return {
        "step": step.long(),
        "even": step % 2 == 0,
        "nested.echo": echo.float(),
        "pair": torch.stack([episode, step], -1).short(),
        "success": ended & (episode % 2 == 0),
        "absent": torch.full((*shape, 2), torch.nan, dtype=torch.float64),
        "never": torch.full(shape, -1, dtype=torch.int8),
    }


def assert_info(batch: TensorDict) -> None:
    """Compare `("next", "info")` of a batch or of frames of CountingEnvs with what it must be; padding must be zero."""
    expected = expected_info(batch["next", "observation"], batch["next", "done"].squeeze(-1))
    mask = batch.get(("collector", "mask"), None)
    info: Any = batch["next", "info"]
    assert set(info.keys()) == set(expected)
    for key, values in expected.items():
        found = info[key]
        if mask is not None:
            assert not found[~mask].any()
        kept = ... if mask is None else mask
        torch.testing.assert_close(found[kept], values[kept], rtol=0, atol=0, equal_nan=True)


def expected_metrics(episode: int, length: int) -> dict[str, float]:
    """Of one whole episode, by METRICS."""
    return {
        "success": float(episode % 2 == 0),
        "steps": length * (length + 1) / 2,
        "mean_step": (length + 1) / 2,
        "longest": float(length),
        "any_even": float(length >= 2),
    }
