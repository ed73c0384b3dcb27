"""An environment of two groups whose observations say what everybody did, and a policy that does its version: together
they tell which version acted, whatever a batch says.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

if TYPE_CHECKING:
    from tensordict import TensorDict

_SEEN = spaces.Box(-1, 2**20, (4,), np.float32)


class Mirror:
    """Two reds, a blue and a gray. An agent sees `[episode, step, its last action, blue's last action]`."""

    possible_agents = ("red_0", "red_1", "blue_0", "gray_0")

    def __init__(self, length: int = 7, lengths: int = 3, *, pays: bool = False) -> None:
        """`pays`: an agent's reward is its action."""
        self._length, self._lengths, self._pays, self._episode = length, lengths, pays, -1

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return _SEEN

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2) if agent == "gray_0" else spaces.Box(-1, 2**20, (1,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self._step, self._episode = list(self.possible_agents), 0, self._episode + 1
        return self._look(dict.fromkeys(self.agents, -1.0)), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        self._step += 1
        did, everybody = {agent: float(np.sum(action)) for agent, action in actions.items()}, self.agents
        is_end = self._step >= self._length + self._episode % self._lengths
        self.agents = [] if is_end else everybody
        flags = dict.fromkeys(everybody, is_end), dict.fromkeys(everybody, False)
        rewards = did if self._pays else dict.fromkeys(everybody, 1.0)
        return self._look(did), rewards, *flags, {agent: {} for agent in everybody}

    def _look(self, did: Mapping[str, float]) -> Any:
        return {agent: np.array([self._episode, self._step, did[agent], did["blue_0"]], np.float32) for agent in did}

    def close(self) -> None:
        pass


class Numbered(torch.nn.Module):
    """Acts with its only weight; a buffer of it must be as old."""

    def __init__(self, observation: Any, action: Any, *, log_prob: bool = False) -> None:
        super().__init__()
        assert (observation.shape, action.shape) == ((4,), (1,)), "the spaces of one agent"
        self.number = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("copied", torch.zeros(1))
        self._log_prob = log_prob

    def forward(self, observation: torch.Tensor) -> Any:
        assert torch.equal(self.number, self.copied)
        action = self.number.expand(len(observation), 1)
        return {"action": action, "action_log_prob": -observation[:, 0]} if self._log_prob else action


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"number": torch.full((1,), float(version)), "copied": torch.full((1,), float(version))}


def scripted(observation: Any, action: Any) -> Any:
    return lambda seen: torch.ones(len(seen), dtype=torch.int64)


class Board(torch.nn.Module):
    """The legal move of TicTacToe that a linear layer likes best."""

    def __init__(self, observation: Any, action: Any) -> None:
        super().__init__()
        self.likes = torch.nn.Linear(18, 9)

    def forward(self, seen: Any) -> torch.Tensor:
        liked = self.likes(seen["observation"].flatten(1).float())
        return liked.masked_fill(~seen["action_mask"], -torch.inf).argmax(-1)


def legal(observation: Any, action: Any) -> Any:
    return lambda seen: seen["action_mask"].long().argmax(-1)


POLICIES: dict[str, Any] = {
    "red": {"entrypoint": "cormorant_testing.versions:Numbered", "kwargs": {"log_prob": True}},
    "blue": {"model": "red", "sample": {"window": 3, "latestRatio": 0.4}},
    "gray": {"random": {}},
}
MIRROR = {"entrypoint": "cormorant_testing.versions:Mirror", "numEnvs": 4, "vectorization": "inline"}


class Check:
    """Every version that a frame says is the one that acted, as the next observation shows it; blue, which draws, plays
    one version in an episode.
    """

    def __init__(self) -> None:
        self.played: dict[int, int] = {}
        """Blue's version by trajectory."""

    def take(self, batch: "TensorDict") -> None:
        collector = batch["collector"]
        mask = collector.get("mask", torch.ones(batch.shape, dtype=torch.bool))
        for group in ("red", "blue"):
            said = collector[group, "policy_version"]
            for shown in (batch[group, "action"], batch["next", group, "observation"][..., 2:3]):
                for acted in (shown.amin((-1, -2)), shown.amax((-1, -2))):
                    assert torch.equal(acted[mask], said[mask].float()), (group, said, acted)
            if group == "blue":
                for trajectory, version in zip(collector["traj_ids"][mask].tolist(), said[mask].tolist(), strict=True):
                    assert self.played.setdefault(trajectory, version) == version
