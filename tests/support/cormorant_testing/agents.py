"""Environments of several agents whose next observations say which actions they were given. Imports neither torch nor
anything of ours: it is copied into images that have PettingZoo.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

AGENTS = ("red_0", "red_1", "blue_0", "green_0", "green_1")
LONGEST = 9
HIGH = float(2**20)


def length_of(ident: int, episode: int) -> int:
    return 1 + (ident * 7 + episode * 5) % LONGEST


def acts(absences: str, ident: int, episode: int, step: int, agent: int) -> bool:
    """Whether an agent acts on what is observed after so many steps. `absences`: "" for none, "deaths" before the
    episode ends, or "returns": of those that come and go.
    """
    if step >= length_of(ident, episode):
        return False
    match absences:
        case "deaths":
            return step < 1 + (ident + episode * 3 + agent * 4) % (2 * LONGEST)
        case "returns":
            return agent == 2 or (ident + episode * 3 + step * (agent + 2)) % 4 > 0
    return True


def is_truncated(ident: int, episode: int, step: int, agent: int) -> bool:
    """How an agent ends that acts no more after so many steps; otherwise it is terminated."""
    return (ident + episode) % 2 == 0 and (step + agent) % 3 == 0


class Party:
    """PettingZoo's parallel API. An agent sees `[ident, episode, step, its last action]`, and earns its first number.
    `crashes`: a step of its life in which every second environment raises.
    """

    state_space = spaces.Box(0, HIGH, (3,), np.float32)

    def __init__(self, *, absences: str = "deaths", crashes: int = 0, is_backward: bool = False) -> None:
        self.possible_agents = AGENTS[::-1] if is_backward else AGENTS
        self._absences, self._crashes = absences, crashes
        self._life, self._ident, self._episode, self._step = 0, 0, -1, 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, HIGH, (5,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, HIGH, (2,), np.float32)

    @property
    def agents(self) -> list[str]:
        now = self._absences, self._ident, self._episode, self._step
        return [agent for i, agent in enumerate(AGENTS) if acts(*now, i)]

    def state(self) -> Any:
        return np.array([self._ident, self._step, len(self.agents)], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self._ident, self._episode = seed % 2**19, -1
        self._episode, self._step = self._episode + 1, 0
        return self._look(dict.fromkeys(self.agents, (0.0, 0.0))), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        assert sorted(actions) == sorted(self.agents), "actions of agents that act"
        self._life += 1
        if self._life == self._crashes and self._ident % 2:
            raise OSError("the simulator died")
        self._step += 1
        present = dict.fromkeys(self.agents, (0.0, 0.0)) | actions
        ends = {agent: agent not in self.agents for agent in present}
        now = self._ident, self._episode, self._step
        cut = {agent: is_end and is_truncated(*now, AGENTS.index(agent)) for agent, is_end in ends.items()}
        rewards = {agent: float(action[0]) for agent, action in present.items()}
        terminated = {agent: is_end and not cut[agent] for agent, is_end in ends.items()}
        return self._look(present), rewards, terminated, cut, {agent: {} for agent in present}

    def get_state(self) -> dict[str, Any]:
        return {"counts": [self._life, self._ident, self._episode, self._step]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._life, self._ident, self._episode, self._step = state["counts"]

    def close(self) -> None:
        pass

    def _look(self, did: Mapping[str, Any]) -> Any:
        told = self._ident, self._episode, self._step
        return {agent: np.array([*told, *action], np.float32) for agent, action in did.items()}


class Unequal(Party):
    """Blue has other actions, which it does not tell."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2) if agent == "blue_0" else super().action_space(agent)


def halves(observation: Any, action: Any) -> Callable[[Any], Any]:
    """A policy of all groups: blue acts 0.5, green 1 and red 1.5."""
    names = sorted(observation.spaces.keys() - {"state"})
    return lambda seen: {
        name: {"action": seen[name]["observation"][..., :2] * 0 + (number + 1) / 2} for number, name in enumerate(names)
    }


def legal(observation: Any, action: Any) -> Callable[[Any], Any]:
    """A policy of one agent: the first legal action."""
    return lambda seen: seen["action_mask"].long().argmax(-1)


class Rounds(AECEnv[str, Any, Any]):
    """Four players take turns with one of 3 actions, of which one is illegal. A player that acts may drop out or throw
    another one out; each turn costs the others. An agent sees `[seed, turn, what it did last, what was done last]`.
    """

    metadata: dict[str, Any] = {"name": "rounds", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = [f"player_{number}" for number in range(4)]
        seen, masks = spaces.Box(-np.inf, np.inf, (4,), np.float64), spaces.Box(0, 1, (3,), np.int8)
        self.observation_spaces = {
            agent: spaces.Dict({"observation": seen, "action_mask": masks}) for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(3) for agent in self.possible_agents}
        self._seed, self._rng = 0, np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> Any:
        seen = np.array([self._seed, self._turn, self._did[agent], self._last], np.float64)
        return {"observation": seen, "action_mask": np.array([(a + self._turn) % 3 != 0 for a in range(3)], np.int8)}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._seed, self._rng = seed, np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._did, self._turn, self._last = dict.fromkeys(self.agents, -1), 0, -1
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert (action + self._turn) % 3 != 0, (agent, action)
        self._cumulative_rewards[agent] = 0
        self._turn, self._last = self._turn + 1, action
        self._did[agent] = action
        self.rewards = {other: float(action) if other == agent else -0.25 for other in self.agents}
        for hit in (agent, self.agents[self._rng.integers(len(self.agents))]):
            self.terminations[hit] |= self._rng.random() < 0.1
        if self._turn >= 20:
            self.truncations = {other: not self.terminations[other] for other in self.agents}
        self._accumulate_rewards()
        at = self.agents.index(agent) + 1
        order = self.agents[at:] + self.agents[:at]
        left = [other for other in order if not (self.terminations[other] or self.truncations[other])]
        self.agent_selection = (left or order)[0]
        self._deads_step_first()
