"""An environment in PettingZoo's parallel API whose agents die and come back at random, and whose next observations say
which actions it was given; and the plain loop that says what its frames must be.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

if TYPE_CHECKING:
    from tensordict import TensorDict

RED, BLUE = ("red_0", "red_1", "red_2"), ("blue_0", "blue_1")
GROUPS = {"red": RED, "blue": BLUE}
_SEEN = spaces.Box(-np.inf, np.inf, (5,), np.float64)


class Skirmish(ParallelEnv[str, Any, Any]):
    """Three reds with 4 actions, of which some are illegal, and two blues with 2 numbers each. An agent sees
    `[seed, episode, step, its last action, sum of all last actions]`; a red in a Dict, beside its action mask.
    """

    metadata: dict[str, Any] = {"name": "skirmish"}  # noqa: RUF012

    def __init__(self, length: int = 12, deaths: float = 0.2, returns: float = 0.3, present: float = 0.7) -> None:
        self.possible_agents = [*RED, *BLUE]
        self.agents: list[str] = []
        self.state_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self._length, self._deaths, self._returns, self._present = length, deaths, returns, present
        self._seed, self._episode, self._step = 0, 0, 0
        self._rng = np.random.default_rng(0)
        self._done: dict[str, float] = {}
        red = spaces.Dict({"observation": _SEEN, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
        self._actions = {agent: spaces.Discrete(4) for agent in RED} | {
            agent: spaces.Box(-1, 1, (2,), np.float32) for agent in BLUE
        }
        self._spaces = dict.fromkeys(RED, red) | dict.fromkeys(BLUE, _SEEN)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._actions[agent]

    def legal(self, agent: str) -> list[int]:
        return [int((action + self._step + int(agent[-1])) % 3 != 0) for action in range(4)]

    def state(self) -> np.ndarray[Any, Any]:
        return np.array([self._seed, self._step, len(self.agents)], np.float64)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode, self._rng = seed, -1, np.random.default_rng(seed)
        self._episode, self._step, self._done = self._episode + 1, 0, {}
        self.agents = [agent for agent in self.possible_agents if self._rng.random() < self._present] or ["blue_1"]
        return self._observe(self.agents)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self.agents), (sorted(actions), self.agents)
        for agent, action in actions.items():
            assert agent in BLUE or self.legal(agent)[action], (agent, action)
        self._step += 1
        self._done = {agent: float(np.sum(action)) for agent, action in actions.items()}
        ends = {agent: self._rng.random() < self._deaths for agent in self.agents}
        kinds = {agent: self._rng.random() < 0.5 for agent in self.agents}
        absent = [agent for agent in self.possible_agents if agent not in actions]
        back = [agent for agent in absent if self._rng.random() < self._returns]
        if self._step >= self._length:
            ends, kinds, back = dict.fromkeys(self.agents, True), dict.fromkeys(self.agents, False), []
        acted = self.agents
        self.agents = [agent for agent in self.possible_agents if agent in back or not ends.get(agent, True)]
        obs, infos = self._observe([*acted, *back])
        rewards = {agent: self._done[agent] + self._step / 8 for agent in acted} | dict.fromkeys(back, 0.0)
        terminations = {agent: ends[agent] and kinds[agent] for agent in acted} | dict.fromkeys(back, False)
        truncations = {agent: ends[agent] and not kinds[agent] for agent in acted} | dict.fromkeys(back, False)
        return obs, rewards, terminations, truncations, infos

    def get_state(self) -> dict[str, Any]:
        counts = [self._seed, self._episode, self._step]
        return {"counts": counts, "done": self._done, "agents": self.agents, "rng": self._rng.bit_generator.state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._seed, self._episode, self._step = state["counts"]
        self._done, self.agents = dict(state["done"]), list(state["agents"])
        self._rng.bit_generator.state = state["rng"]

    def close(self) -> None:
        pass

    def _observe(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        obs: dict[str, Any] = {}
        for agent in agents:
            echo, everything = self._done.get(agent, 0.0), sum(self._done.values())
            seen = np.array([self._seed, self._episode, self._step, echo, everything])
            mask = np.array(self.legal(agent), np.int8)
            obs[agent] = {"observation": seen, "action_mask": mask} if agent in RED else seen
        return obs, {agent: {} for agent in agents}


def first_legal(observation: Any, action: Any) -> Callable[[Any], Any]:
    """A policy for Skirmish: the first legal action for reds, and ones for blues."""

    def act(seen: Any) -> Any:
        red = {"action": seen["red"]["action_mask"].long().argmax(-1)}
        return {"red": red, "blue": {"action": seen["blue"]["observation"][..., :2].float() * 0 + 1}}

    return act


class Rounds(AECEnv[str, Any, Any]):
    """Four players take turns with one of 3 actions, of which one is illegal. A player that acts may drop out or throw
    another one out; each turn costs the others. An agent sees `[seed, turn, what it did last, what was done last]`.
    """

    metadata: dict[str, Any] = {"name": "rounds", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, length: int = 20) -> None:
        super().__init__()
        self.possible_agents = [f"player_{number}" for number in range(4)]
        seen, masks = spaces.Box(-np.inf, np.inf, (4,), np.float64), spaces.Box(0, 1, (3,), np.int8)
        self.observation_spaces = {
            agent: spaces.Dict({"observation": seen, "action_mask": masks}) for agent in self.possible_agents
        }
        self.action_spaces = {agent: spaces.Discrete(3) for agent in self.possible_agents}
        self._length, self._seed, self._rng = length, 0, np.random.default_rng(0)

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
        if self._turn >= self._length:
            self.truncations = {other: not self.terminations[other] for other in self.agents}
        self._accumulate_rewards()
        at = self.agents.index(agent) + 1
        order = self.agents[at:] + self.agents[:at]
        left = [other for other in order if not (self.terminations[other] or self.truncations[other])]
        self.agent_selection = (left or order)[0]
        self._deads_step_first()


Key = tuple[str, ...]
Frame = dict[Key, Any]


def expected_frames(seed: int, *, ends_on_any: bool = False, **kwargs: Any) -> Generator[Frame, Any, None]:
    """What the frames of one environment must be, from a plain loop: `next` gives what is acted upon, and sending what
    was done, `{group: [n, ...]}`, gives the frame.
    """
    env = Skirmish(**kwargs)
    given = env.reset(seed=seed)[0]
    while True:
        before, acting = _seen(env, given), set(env.agents)
        actions = yield before
        done = {
            agent: actions[group][i]
            for group, agents in GROUPS.items()
            for i, agent in enumerate(agents)
            if agent in acting
        }
        given, rewards, terminations, truncations, _ = env.step(done)
        frame = before | {("next", *key): value for key, value in _seen(env, given).items()}
        ended = [agent for agent in acting if terminations[agent] or truncations[agent]]
        is_over = bool(ended) if ends_on_any else not env.agents
        cut = any(truncations[agent] for agent in acting)
        flags = {"terminated": is_over and not cut, "truncated": is_over and cut}
        if ends_on_any:
            flags = {"terminated": any(terminations[agent] for agent in acting), "truncated": cut}
        for group, agents in GROUPS.items():
            frame["next", group, "reward"] = np.array([[rewards.get(agent, 0)] for agent in agents], np.float32)
            both = [(terminations.get(agent, True), truncations.get(agent, False)) for agent in agents]
            if is_over:  # which is the end of those who had none of their own
                both = [one if any(one) else (not flags["truncated"], flags["truncated"]) for one in both]
            terminated, truncated = (np.array([[one[i]] for one in both]) for i in range(2))
            frame |= {("next", group, "terminated"): terminated, ("next", group, "truncated"): truncated}
            frame["next", group, "done"] = terminated | truncated
        frame |= {("next", name): np.array([flag]) for name, flag in flags.items()}
        frame["next", "done"] = np.array([is_over])
        yield frame
        if is_over:
            given = env.reset()[0]


def _seen(env: Skirmish, obs: Mapping[str, Any]) -> Frame:
    red = [obs[agent]["observation"] if agent in obs else np.zeros(5) for agent in RED]
    masks = [env.legal(agent) if agent in env.agents else [1] * 4 for agent in RED]
    return {
        ("red", "observation"): np.array(red),
        ("red", "action_mask"): np.array(masks) == 1,
        ("red", "mask"): np.array([agent in env.agents for agent in RED]),
        ("blue", "observation"): np.array([obs.get(agent, np.zeros(5)) for agent in BLUE]),
        ("blue", "mask"): np.array([agent in env.agents for agent in BLUE]),
        ("state",): env.state(),
    }


class FrameCheck:
    """Compares every value of every frame of batches, given in order, with the plain loop."""

    def __init__(self, *, ends_on_any: bool = False, hidden: Sequence[Key] = (), **kwargs: Any) -> None:
        """`hidden`: keys of frames that the loop does not know."""
        self._options = {"ends_on_any": ends_on_any, **kwargs}
        self._hidden = {("collector", "traj_ids"), ("collector", "policy_version"), *hidden}
        self._loops: dict[int, Generator[Frame, Any, None]] = {}
        self.num_frames = 0
        self.num_ends = 0
        self.agent_steps = 0

    @property
    def num_envs(self) -> int:
        return len(self._loops)

    def take(self, batch: "TensorDict") -> None:
        arrays = {key if isinstance(key, tuple) else (key,): value.numpy() for key, value in batch.items(True, True)}
        is_frame = arrays.pop(("collector", "mask"), np.ones(batch.shape, bool))
        for row in range(len(batch)):
            seed = int(arrays["state",][row, 0, 0])
            loop = self._loops.setdefault(seed, expected_frames(seed, **self._options))
            for t in range(int(is_frame[row].sum())):
                next(loop)
                wanted = loop.send({group: arrays[group, "action"][row, t] for group in GROUPS})
                wanted |= {(group, "action"): arrays[group, "action"][row, t] for group in GROUPS}
                assert set(wanted) == set(arrays) - self._hidden
                for key, value in wanted.items():
                    found = arrays[key][row, t]
                    assert found.shape == np.shape(value), (key, found.shape)
                    assert np.array_equal(found, value), (seed, t, key, found, value)
                self.num_frames += 1
                self.num_ends += int(wanted["next", "done"][0])
                self.agent_steps += sum(int(wanted[group, "mask"].sum()) for group in GROUPS)
