"""Where collected batches are stored: TorchRL's replay buffers, anything with `extend`, or Tianshou's buffers.

# B columns (environments), T rows (steps), S sub-buffers; L[b] frames of column b
"""

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from cormorant_compat.arguments import room_of
from cormorant_compat.tianshou.policies import batch_class
from cormorant_worker.spaces import Array, put_nested

if TYPE_CHECKING:
    from tensordict import TensorDict

_STATE = ("_insertion_idx", "_size", "_ep_return", "_ep_len", "_ep_start_idx", "last_index", "maxsize")
_PLAIN_ADDS = ("ReplayBuffer.add", "ReplayBufferManager.add", "PrioritizedReplayBuffer.add")


def as_store(buffer: Any) -> "Extended | TianshouStore":
    """Wrap a buffer by what it can do."""
    if callable(getattr(buffer, "extend", None)) and not isinstance(buffer, list):
        return Extended(buffer)
    if callable(getattr(buffer, "add", None)) and hasattr(buffer, "maxsize") and hasattr(buffer, "_meta"):
        return TianshouStore(buffer)
    raise ValueError(
        f"{type(buffer).__name__} is not a buffer: it has neither TorchRL's extend(batch) nor Tianshou's add(batch, "
        "buffer_ids); give one of those, LatestBatch(), or nothing"
    )


def usual_buffer(num_envs: int) -> Any:
    """The buffer that Tianshou's collector creates by default; None if Tianshou was not imported."""
    data = sys.modules.get("tianshou.data")
    if data is None:
        return None
    size = getattr(sys.modules.get("tianshou.data.collector"), "DEFAULT_BUFFER_MAXSIZE", 10_000)
    return data.VectorReplayBuffer(size * num_envs, num_envs)


class Extended:
    """TorchRL's buffers, and whatever else takes TensorDicts with `extend`.

    Single frames `[N]`, one environment's after the other's; whole batches `[B, T]` where the buffer says `keeps_time`.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._keeps_time = bool(getattr(buffer, "keeps_time", False))

    def room(self, num_envs: int) -> int | None:
        """Frames that surely fit; None if that is unknown."""
        del num_envs
        return room_of(self._buffer)[0]

    def take(self, batch: "TensorDict", lengths: Array) -> None:
        """Store a batch `[B, T]`, of which column b has `lengths[b]` frames."""
        from cormorant_postproc import frames_of

        self._buffer.extend(batch if self._keeps_time else frames_of(batch))

    def reset(self, *, keep_statistics: bool) -> None:
        self._buffer.empty()


class TianshouStore:
    """Tianshou's buffers, written as its own `add` would write them, a whole batch at once.

    Tianshou's collector spends most of its time in one `add` per vector step. Here the first row goes through `add`,
    which allocates; the others are written into the same arrays, and the counters are set as that many `add` calls
    would have set them. Buffers of other classes (hindsight, cached) get one `add` per row.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._subs = list(getattr(buffer, "buffers", [buffer]))
        self._is_manager = hasattr(buffer, "buffers")
        self._is_plain = (
            getattr(type(buffer).add, "__qualname__", "") in _PLAIN_ADDS
            and all(getattr(type(sub).add, "__qualname__", "") in _PLAIN_ADDS for sub in self._subs)
            and all(hasattr(sub, name) for sub in self._subs for name in _STATE)
            and (not self._is_manager or (hasattr(buffer, "_offset") and hasattr(buffer, "_lengths")))
        )

    def room(self, num_envs: int) -> int | None:
        """Frames that surely fit; None if that is unknown. Raises ValueError when there are too few sub-buffers."""
        cached = getattr(self._buffer, "cached_buffer_num", None)
        room = len(self._subs) if cached is None else int(cached)
        if room < num_envs:
            raise ValueError(
                f"{type(self._buffer).__name__} has room for {room} environments and there are {num_envs}; use "
                f"VectorReplayBuffer(total_size, buffer_num={num_envs})"
            )
        return None if cached is not None else num_envs * min(int(sub.maxsize) for sub in self._subs)

    def take(self, batch: "TensorDict", lengths: Array) -> None:
        values, extra = _as_theirs(batch)
        columns = np.flatnonzero(lengths > 0)
        if not len(columns):
            return
        rows = np.zeros_like(lengths)
        if not self._buffer._meta.get_keys() or not self._is_plain:
            # The first row allocates; without the short way every row goes like this.
            until = 1 if self._is_plain else int(lengths.max())
            for row in range(until):
                present = np.flatnonzero(lengths > row)
                one = batch_class()(_pick(values, present, np.full(len(present), row)))
                self._buffer.add(one, buffer_ids=present)
            rows[columns] = np.minimum(lengths[columns], until)
        before = [int(sub._insertion_idx) if self._is_plain else 0 for sub in self._subs]
        if self._is_plain and (rows < lengths).any():
            self._write(values, rows, lengths)
        if extra and not self._is_plain:
            raise ValueError(
                f"hooks gave {sorted(extra)}, and {type(self._buffer).__name__} cannot take keys of its own; use a "
                "VectorReplayBuffer"
            )
        for column in columns.tolist() if extra else ():
            sub, count = self._subs[column], int(lengths[column])
            offset = int(self._buffer._offset[column]) if self._is_manager else 0
            at = offset + (before[column] - int(rows[column]) + np.arange(count)) % sub.maxsize
            for key, given in extra.items():
                self._buffer.set_array_at_key(
                    given[column, :count], key, index=at, default_value=np.nan if given.dtype.kind == "f" else 0
                )

    def reset(self, *, keep_statistics: bool) -> None:
        self._buffer.reset(keep_statistics=keep_statistics)

    def _write(self, values: dict[str, Any], rows: Array, lengths: Array) -> None:
        # Frames `rows[b] .. lengths[b]` of every column.
        buffer = self._buffer
        columns = np.repeat(np.arange(len(lengths)), lengths - rows)
        steps = np.concatenate([np.arange(start, stop) for start, stop in zip(rows, lengths, strict=True)])
        begins = np.array([int(sub._insertion_idx) for sub in self._subs])
        self._count(values, columns, steps, rows, lengths)
        # Where a column has more than its sub-buffer holds, the last ones stay.
        sizes = np.array([int(sub.maxsize) for sub in self._subs])
        stays = lengths[columns] - steps <= sizes[columns]
        columns, steps = columns[stays], steps[stays]
        offsets = buffer._offset if self._is_manager else np.zeros(1, dtype=np.int64)
        at = offsets[columns] + (begins[columns] + steps - rows[columns]) % sizes[columns]
        kept = dict(values)
        if buffer._save_only_last_obs:
            kept["obs"] = kept["obs"][:, :, -1]
            kept["obs_next"] = kept["obs_next"][:, :, -1]
        if not buffer._save_obs_next:
            kept.pop("obs_next")
        _assign(buffer._meta, kept, at, columns, steps)
        if hasattr(buffer, "init_weight"):
            buffer.init_weight(at)

    def _count(self, values: dict[str, Any], columns: Array, steps: Array, rows: Array, lengths: Array) -> None:
        # To where one `add` for each of these frames would leave the counters of sub-buffers.
        ends = values["done"][columns, steps]
        since = np.full(len(lengths), -1, dtype=np.int64)
        np.maximum.at(since, columns[ends], steps[ends] + 1)
        is_open = steps >= since[columns]
        earned = np.bincount(
            columns[is_open], weights=values["rew"][columns[is_open], steps[is_open]], minlength=len(lengths)
        )
        told = zip(rows.tolist(), lengths.tolist(), since.tolist(), earned.tolist(), strict=True)
        for column, (start, stop, after, reward) in enumerate(told):
            if stop == start:
                continue
            sub = self._subs[column]
            begin, size = sub._insertion_idx, sub.maxsize
            sub.last_index[0] = last = (begin + stop - start - 1) % size
            sub._size = min(sub._size + stop - start, size)
            sub._insertion_idx = (begin + stop - start) % size
            if after >= 0:
                sub._ep_return, sub._ep_len = reward, stop - after
                sub._ep_start_idx = (begin + after - start) % size
            else:
                sub._ep_return += reward
                sub._ep_len += stop - start
            if self._is_manager:
                self._buffer.last_index[column] = last + self._buffer._offset[column]
                self._buffer._lengths[column] = sub._size


def _as_theirs(batch: "TensorDict") -> tuple[dict[str, Any], dict[str, Array]]:
    # By Tianshou's names, arrays `[B, T, ...]`; and what has no name there.
    following = batch["next"]
    flags = {name: following[name].squeeze(-1).numpy() for name in ("terminated", "truncated", "done")}
    columns = np.arange(batch.shape[0])[:, None].repeat(batch.shape[1], axis=1)
    policy = arrays(batch["policy"]) if "policy" in batch else {}
    if "hidden_state" in following:
        policy["hidden_state"] = arrays(following["hidden_state"])
    info: dict[str, Any] = {}
    # Declared info; keys with dots are the nested dicts that they were.
    for key, declared in arrays(following.get("info", {})).items():
        put_nested(info, tuple(key.split(".")), declared)
    values = {
        "obs": arrays(batch["observation"]),
        "act": arrays(batch["action"]),
        "rew": following["reward"].squeeze(-1).numpy().astype(np.float64),
        **flags,
        "obs_next": arrays(following["observation"]),
        "info": {"env_id": columns, **info},
        "policy": policy,
    }
    extra = batch.get("hooked", None)
    return values, {} if extra is None else {str(key): value.numpy() for key, value in extra.items()}


def arrays(value: Any) -> Any:
    """A tensor as an array, a TensorDict or a dict as nested dicts of them."""
    if hasattr(value, "items"):
        return {str(key): arrays(part) for key, part in value.items()}
    return value.numpy()


def _pick(values: dict[str, Any], columns: Array, rows: Array) -> dict[str, Any]:
    return {
        key: _pick(value, columns, rows) if isinstance(value, dict) else value[columns, rows]
        for key, value in values.items()
    }


def _assign(target: Any, values: dict[str, Any], at: Array, columns: Array, rows: Array) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            if value:
                _assign(target[key], value, at, columns, rows)
        else:
            target[key][at] = value[columns, rows]


class LatestBatch:
    """Keeps the last batch `[B, T]`, masked when columns have different lengths; see `batch.to_tensordict`."""

    keeps_time = True

    def __init__(self) -> None:
        self.tensordict: TensorDict | None = None
        """None until something was collected."""

    def extend(self, batch: "TensorDict") -> None:
        """Replace the last batch by a copy of this one."""
        self.tensordict = batch.clone()

    def empty(self) -> None:
        self.tensordict = None

    def __len__(self) -> int:
        if self.tensordict is None:
            return 0
        if ("collector", "mask") in self.tensordict.keys(True):
            return int(self.tensordict["collector", "mask"].sum())
        return int(self.tensordict.numel())
