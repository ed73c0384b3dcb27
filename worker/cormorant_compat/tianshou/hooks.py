"""Hooks: functions of a script that see each vector step, and each whole episode, before they are stored.

    on_step(actions, rollout)       once per vector step, in order, when the batch has been collected
    on_episode(episode) -> more     once an episode that ended; arrays of its length are stored beside it

They get Tianshou's Batches where Tianshou is in use, TensorDicts `[n]` otherwise, with Tianshou's names in both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cormorant_compat.tianshou.buffers import arrays
from cormorant_worker.spaces import Array

if TYPE_CHECKING:
    from tensordict import TensorDict

StepHook = Callable[[Any, Any], Any]
EpisodeHook = Callable[[Any], Mapping[str, Any] | None]


class Hooks:
    """Calls hooks for a batch, and keeps the beginnings of episodes that go on in the next one."""

    def __init__(self, on_step: StepHook | None, on_episode: EpisodeHook | None, *, batch_class: Any) -> None:
        self.on_step = on_step
        self.on_episode = on_episode
        self._batch_class = batch_class
        self._begun: dict[int, list[TensorDict]] = {}
        """Frames of each column's open episode, of earlier batches."""

    @property
    def are_none(self) -> bool:
        return self.on_step is None and self.on_episode is None

    def forget(self) -> None:
        self._begun.clear()

    def see(self, batch: "TensorDict", lengths: Array, *, may_store: bool) -> None:
        """Call the hooks for a batch `[B, T]`, of which column b has `lengths[b]` frames. What they change in place is
        changed in the batch, and what they add is under "hooked". `may_store`: episode hooks may return values; only
        where all episodes are whole.
        """
        if self.on_step is not None:
            for row in range(int(lengths.max(initial=0))):
                self._see_step(batch, np.flatnonzero(lengths > row), row)
        if self.on_episode is not None:
            for column in np.flatnonzero(lengths).tolist():
                self._see_column(batch, column, int(lengths[column]), may_store=may_store)

    def _see_step(self, batch: "TensorDict", columns: Array, row: int) -> None:
        assert self.on_step is not None
        at = torch.from_numpy(columns), row
        step = batch[at]
        given = self._named(step)
        actions = {"act": given["act"], "act_normalized": step.get("env_action", step["action"])}
        rollout = self._wrapped(given, len(columns))
        self.on_step(self._wrapped(actions, len(columns)), rollout)
        for name, value in _leaves_of(rollout):
            values = _as_tensor(value, len(columns), name)
            # To where the batch has the field: the hook saw a copy.
            column = batch.get((*_PLACES.get(name[0], ("",)), *name[1:]), None)
            if column is None:
                column = _room(batch, ".".join(name), values)
            column[at] = values.reshape(len(columns), *column.shape[2:]).to(column.dtype)

    def _see_column(self, batch: "TensorDict", column: int, length: int, *, may_store: bool) -> None:
        assert self.on_episode is not None
        begin = 0
        done = batch["next", "done"][column, :length, 0]
        # What step hooks added may be in some parts of an episode only, and so may the mask of an uneven batch.
        frames = batch[column].exclude("hooked", ("collector", "mask"))
        for end in done.nonzero().squeeze(-1).tolist():
            parts = [*self._begun.pop(column, []), frames[begin : end + 1]]
            episode: TensorDict = torch.cat(parts) if len(parts) > 1 else parts[0]
            more = self.on_episode(self._wrapped(self._named(episode), len(episode)))
            if more is not None:
                if not may_store:
                    raise ValueError(
                        f"on_episode_done_hook returned {sorted(more)} with n_step: frames of the episode are stored "
                        "already; collect with n_episode, or return None"
                    )
                for key, given in more.items():
                    values = torch.as_tensor(np.asarray(given))
                    if values.shape[:1] != (end + 1 - begin,):
                        raise ValueError(
                            f"on_episode_done_hook returned {key} of shape {list(values.shape)} for an episode of "
                            f"{end + 1 - begin} frames; return one value a frame"
                        )
                    _room(batch, str(key), values)[column, begin : end + 1] = values
            begin = end + 1
        if begin < length:
            self._begun.setdefault(column, []).append(frames[begin:length].clone())

    def _named(self, frames: "TensorDict") -> dict[str, Any]:
        missing = {name for name in ("policy", "info") if frames.get(_PLACES[name], None) is None}
        named = {name: frames[place] for name, place in _PLACES.items() if name not in missing}
        return named | {name: named[name].squeeze(-1) for name in ("rew", *_FLAGS)}

    def _wrapped(self, named: dict[str, Any], n: int) -> Any:
        if self._batch_class is not None:
            return self._batch_class(arrays(named))
        from tensordict import TensorDict

        return TensorDict(named, batch_size=[n])


def _room(batch: "TensorDict", key: str, values: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] where values that hooks gave are kept; NaN or 0 where they gave none."""
    place = ("hooked", key)
    if place not in batch.keys(True):
        fill = float("nan") if values.dtype.is_floating_point else 0
        batch[place] = torch.full((*batch.shape, *values.shape[1:]), fill, dtype=values.dtype)
    found: torch.Tensor = batch[place]
    return found


_FLAGS = ("terminated", "truncated", "done")
_PLACES: Mapping[str, tuple[str, ...]] = {
    "obs": ("observation",),
    "act": ("action",),
    "rew": ("next", "reward"),
    "obs_next": ("next", "observation"),
    **{name: ("next", name) for name in _FLAGS},
    "info": ("next", "info"),
    "policy": ("policy",),
}
"""By what hooks are given: where batches have it."""


def _leaves_of(given: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in given.get_keys() if hasattr(given, "get_keys") else given.keys():
        value = given[name]
        if hasattr(value, "get_keys") or hasattr(value, "batch_size"):
            yield from _leaves_of(value, (*prefix, str(name)))
        else:
            yield (*prefix, str(name)), value


def _as_tensor(value: Any, n: int, name: tuple[str, ...]) -> torch.Tensor:
    values = torch.as_tensor(value if isinstance(value, torch.Tensor) else np.asarray(value)).detach()
    if values.shape[:1] != (n,):
        raise ValueError(
            f"on_step_hook gave {'.'.join(name)} of shape {list(values.shape)} for {n} frames; give one value a frame"
        )
    return values
