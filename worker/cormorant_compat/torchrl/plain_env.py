"""`MultiThreadedEnv` where TorchRL is not installed: the same methods on TensorDicts, without its specs."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from tensordict import TensorDict

from cormorant_compat.torchrl.plan import next_seed
from cormorant_compat.torchrl.pool import Build, OfPool, OfTask, Pool, PoolOptions
from cormorant_worker.spaces import Space

Policy = Callable[[TensorDict], TensorDict]


class MultiThreadedEnvWrapper(OfPool):
    """A pool that `envpool.make` built, as a TorchRL environment; see `torchrl/env.py` for the arguments."""

    def _begin(self, build: Build, **options: Unpack[PoolOptions]) -> None:
        self.pool = Pool(build, **options)
        self.device = self.pool.named_device
        self.num_workers = self.pool.num_envs
        self.batch_size = torch.Size([self.num_workers])

    @property
    def observation_space(self) -> Space:
        """Space of one environment. With TorchRL installed, the class has specs instead."""
        return self.pool.env.observation_space

    @property
    def action_space(self) -> Space:
        return self.pool.env.action_space

    def reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        """Begin new episodes in all environments, or in those that `_reset` marks."""
        begun = self.pool.begin(None if tensordict is None else tensordict.get("_reset", None))
        return self._with_flags(begun)

    def _with_flags(self, begun: Mapping[str, Any]) -> TensorDict:
        no = torch.zeros((self.num_workers, 1), dtype=torch.bool)
        flags = {name: no.clone() for name in ("done", "terminated", "truncated")}
        return TensorDict({**begun, **flags}, batch_size=self.batch_size, device=self.device)

    def step(self, tensordict: TensorDict) -> TensorDict:
        """Step with `tensordict["action"]`, and write the result under "next"."""
        led = TensorDict(self.pool.step(tensordict["action"]), batch_size=self.batch_size, device=self.device)
        return tensordict.set("next", led)

    def rand_step(self, tensordict: TensorDict | None = None) -> TensorDict:
        """Step with random actions from the current states; where an episode ended, the next one begins."""
        given = tensordict
        if given is None:
            none = torch.zeros((self.num_workers, 1), dtype=torch.bool)
            given = self._with_flags(self.pool.begin(none))
        return self.step(given.set("action", self.pool.draw()))

    def rollout(self, max_steps: int, policy: Policy | None = None, *, break_when_any_done: bool = True) -> TensorDict:
        """Reset, then play: TensorDict [N, T] with T <= `max_steps`. `policy` writes "action" into the TensorDict it
        gets; None: random actions.
        """
        rows = []
        current = self.reset()
        for _ in range(max_steps):
            acted = current.set("action", self.pool.draw()) if policy is None else policy(current)
            rows.append(self.step(acted))
            following = rows[-1]["next"]
            if break_when_any_done and bool(following["done"].any()):
                break
            kept = [key for key in following.keys() if key != "reward"]  # noqa: SIM118  # a TensorDict, not a dict
            current = following.select(*kept).clone()
            if bool(following["done"].any()):
                current = self.reset(current.set("_reset", following["done"]))
        stacked: TensorDict = torch.stack(rows, dim=1)
        stacked.names = [None, "time"]
        return stacked

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Rebuild the environments, each with a seed derived from this one. Returns the next seed."""
        self.pool.reseed(seed)
        return seed if static_seed else next_seed(seed, 1)

    def close(self) -> None:
        """Release the pool. May be called twice."""
        self.pool.close()


class MultiThreadedEnv(OfTask, MultiThreadedEnvWrapper):
    """An EnvPool task as a TorchRL environment; see `torchrl/env.py` for the arguments."""
