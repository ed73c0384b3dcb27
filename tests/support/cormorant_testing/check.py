"""Compares every value of every batch of a CountingEnv job with what it must be, in the order of delivery.

A trajectory id says which worker attempt collected a frame; its seed, and with it every value, follows:

    checker = Checker(job_seed=7, num_envs=3, options={"lengths": (2, 3)})
    for batch in LocalFleet(fleet).batches():
        checker.take(batch)
    assert checker.frames == 10_000
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_testing.envs import ACTION_SPACES, IDENT_MODULUS, OBSERVATION_SPACES, Oracle
from cormorant_testing.frame_loop import Attempt, Frame, FrameLoop, Moment, Stream
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.spaces import flatten, leaves, unflattener


@dataclass(kw_only=True)
class Checker(FrameLoop):
    job_seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the CountingEnv."""
    action: str = "discrete"
    acts_by_version: bool = False
    """The policy is `versioned`: the first number of each action is the version of the weights that chose it."""
    versions: bool = True
    """False: all frames are random ones, of version -1."""

    def __post_init__(self) -> None:
        self._space, acts = OBSERVATION_SPACES[self.options.get("observation", "box")], ACTION_SPACES[self.action]
        self._observed, self._acted = (
            [".".join(leaf.key) for leaf in leaves(space, (name,))]
            for space, name in ((self._space, "observation"), (acts, "action"))
        )
        self._action_dtypes, self._as_action = [leaf.dtype for leaf in leaves(acts, ())], unflattener(acts)

    @property
    def attempts(self) -> set[tuple[int, int, int]]:
        """Worker attempts that have delivered frames, of any epoch."""
        return {attempt[:3] for attempt, _ in self.streams}

    def _open(self, key: Attempt, column: int) -> Stream:
        group, index, attempt, epoch = key
        path = WorkerPlace(seed=self.job_seed, group_number=group, index=index, attempt=attempt, epoch=epoch)
        return Stream(ident=path.env_seeds(self.num_envs)[column] % IDENT_MODULUS)

    def _place(self, f: Frame, s: Stream) -> tuple[int | None, int, int]:
        if self._observed != ["observation"] or f["observation"].shape != (4,):
            return s.ident, s.episode + 1, 0  # the values of its first frame say whether this is so
        ident, episode, step = map(int, f["observation"][:3])
        return ident, episode, step

    def _first(self, s: Stream) -> Mapping[str, Any]:
        return self._seen("", self._oracle(s).obs(s.episode, 0))

    def _check_acting(self, f: Frame, s: Stream, version: int) -> None:
        assert self.versions or version == -1, f"version {version} of a random policy"
        if self.acts_by_version and version >= 0:
            acted = float(f[self._acted[0]].reshape(-1)[0])
            assert acted == version, f"weights {acted} acted, stamped as version {version}"
        self._check_count(f, s, "count", 0.0, acts=version >= 0)

    def _moment(self, f: Frame, s: Stream) -> Moment:
        oracle, parts = self._oracle(s), [f[name] for name in self._acted]
        assert [part.dtype for part in parts] == self._action_dtypes
        action = self._as_action(parts)
        moment = oracle.moment(s.episode, s.step, action)
        reached = self._seen("next.", oracle.obs(s.episode, s.step, action))
        values = reached | {"next.reward": np.float32(moment.reward)}
        return Moment(values, moment.terminated, moment.truncated)

    def _seen(self, where: str, observation: Any) -> dict[str, Any]:
        parts = flatten(self._space, observation)
        return {f"{where}{name}": part for name, part in zip(self._observed, parts, strict=True)}

    def _oracle(self, s: Stream) -> Oracle:
        assert s.ident is not None
        return Oracle.of(s.ident, self.options)
