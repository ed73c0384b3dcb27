"""The smallest buffer: what the last `collect` brought, for learners that use each batch once."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict


class LatestBatch:
    """Keeps the last batch `[B, T]`, masked when columns have different lengths; see `batch.to_tensordict`."""

    keeps_time = True

    def __init__(self) -> None:
        self.tensordict: TensorDict | None = None
        """None until something was collected."""

    def extend(self, batch: "TensorDict") -> None:
        """Keep a batch instead of the last one. It owns its memory."""
        self.tensordict = batch.clone()

    def empty(self) -> None:
        self.tensordict = None

    def __len__(self) -> int:
        if self.tensordict is None:
            return 0
        if ("collector", "mask") in self.tensordict.keys(True):
            return int(self.tensordict["collector", "mask"].sum())
        return int(self.tensordict.numel())
