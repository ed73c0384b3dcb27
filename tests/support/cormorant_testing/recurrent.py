"""Policies with hidden states."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn


class Counter(TensorDictModuleBase):
    """Recurrent: `count` is the number of frames since the trajectory began. Draws its actions, and one number more."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation", "count", "is_init"], ["action", "drawn", ("next", "count")]
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        count = tensordict["count"]
        tensordict["action"] = (count.squeeze(-1).long() + torch.randint(0, 5, count.shape[:1])) % 5
        tensordict["drawn"] = torch.rand(count.shape[0])
        tensordict["next", "count"] = count + 1
        return tensordict

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        return {"count": torch.zeros(batch_size, 1)}


class InHalf(TensorDictModuleBase):
    """Recurrent, and computes in bfloat16 but for `value`: `logits` are thirds of the step, `hidden` sums them up."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__()
        self.in_keys = ["observation", "hidden"]
        self.out_keys = ["action", "logits", "value", ("next", "hidden")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = tensordict["observation"][:, 2:3].bfloat16()
        hidden = tensordict["hidden"]
        assert hidden.dtype == torch.bfloat16
        tensordict["logits"] = torch.cat([step / 3, -step / 3], -1)
        tensordict["value"] = tensordict["observation"][:, 2:3] / 3
        tensordict["next", "hidden"] = hidden + step / 3
        tensordict["action"] = step[:, 0].long() % 5
        return tensordict

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        return {"hidden": torch.full((batch_size, 1), 0.1, dtype=torch.bfloat16)}
