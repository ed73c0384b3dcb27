"""CUDA graphs of what a policy's rollout does in a row of the batch: one launch instead of one per kernel.

    1st batch   every row is computed as it is written here, and watched: what needs the host cannot be recorded
    2nd batch   every row is recorded, and replayed
    later       replayed

A graph is a list of kernels with the addresses that they read and write. So a row reads and writes the same memory in
every batch, and weights and statistics are replaced in place.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cormorant_worker.policy.actor import PolicyActor

log = structlog.get_logger()

Act = Callable[[], None]


def cuda_recorder(actor: PolicyActor) -> Callable[[Act], Act]:
    """Records on the policy's device. Each replay draws new numbers, from the policy's generators and torch's own."""
    pool = torch.cuda.graph_pool_handle()
    of_policy = (value for value in _attributes(actor) if isinstance(value, torch.Generator))
    generators = [generator for generator in of_policy if generator.device.type == "cuda"]

    def record(act: Act) -> Act:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Other threads of the process may synchronize meanwhile.
        with torch.cuda.device(actor.device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            act()
        return graph.replay

    return record


class RowGraphs:
    """The graphs of the rows of one piece of memory. Used by the collector's thread."""

    def __init__(self, actor: PolicyActor, record: Callable[[Act], Act]) -> None:
        self._actor, self._record = actor, record
        self._replays: dict[int, Act | None] = {}
        """By row; None: watched, and not recorded yet."""
        # What a plain function keeps cannot be seen.
        self.refused = "" if actor.models.modules else "the policy is not a torch module"
        """Why nothing is recorded."""

    @property
    def num_recorded(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(self, row: int, act: Act) -> None:
        """Do what `act` does, which is the same for this row each time."""
        if self.refused:
            return act()
        if replay := self._replays.get(row):
            return replay()
        if row not in self._replays:
            self._replays[row] = None
            before = self._on_host()
            with _Watch() as watch:
                act()
            changed = "keeps or draws numbers on the host" if self._on_host() != before else ""
            return self._refuse(watch.found or changed)
        try:
            self._replays[row] = replay = self._record(act)
        except RuntimeError as error:
            self._refuse(f"raised {type(error).__name__} as it was recorded: {error}")
            return act()
        return replay()

    def _refuse(self, reason: str) -> None:
        if reason:
            self.refused = f"the policy {reason}"
            log.warning("policy_not_recorded", reason=self.refused, remedy="see compile in the guide to own policies")

    def _on_host(self) -> list[Any]:
        """State that a replay would not change again: random states of the host, and plain attributes of the policy."""
        plain = [value for value in _attributes(self._actor) if isinstance(value, bool | int | float | str)]
        drawn = [random.getstate(), np.random.get_state(legacy=False)["state"]]
        if self._actor.device.type != "cpu":
            drawn.append(torch.get_rng_state().tolist())
        return [plain, *map(str, drawn)]


def _attributes(actor: PolicyActor) -> list[Any]:
    modules = [part for module in actor.models.modules.values() for part in module.modules()]
    return [value for part in modules for value in vars(part).values()]


class _Watch(TorchDispatchMode):
    """Finds what waits for the device: a number that Python reads, a shape that depends on values, a copy elsewhere."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        is_read = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if is_read or len(devices) > 1:
            self.found = self.found or f"waits for its device in {func}"
        return result
