"""What CountingEnvs' info must be in a batch."""

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


def assert_info(batch: TensorDict) -> None:
    """Compare `("next", "info")` of a batch or of frames with what their true following observations say it must be;
    padding must be zero.
    """
    _, episode, step, echo = batch["next", "observation"].unbind(-1)
    expected = {
        "step": step.long(),
        "even": step % 2 == 0,
        "nested.echo": echo.float(),
        "pair": torch.stack([episode, step], -1).short(),
        "success": batch["next", "done"].squeeze(-1) & (episode % 2 == 0),
        "absent": torch.full((*step.shape, 2), torch.nan, dtype=torch.float64),
        "never": torch.full(step.shape, -1, dtype=torch.int8),
    }
    mask = batch.get(("collector", "mask"), torch.ones(step.shape, dtype=torch.bool))
    info: Any = batch["next", "info"]
    assert set(info.keys()) == set(expected)
    for key, values in expected.items():
        assert not info[key][~mask].any()
        torch.testing.assert_close(info[key][mask], values[mask], rtol=0, atol=0, equal_nan=True)


def expected_metrics(episode: int, length: int) -> dict[str, float]:
    """Of one whole episode, by METRICS."""
    return {
        "success": float(episode % 2 == 0),
        "steps": length * (length + 1) / 2,
        "mean_step": (length + 1) / 2,
        "longest": float(length),
        "any_even": float(length >= 2),
    }
