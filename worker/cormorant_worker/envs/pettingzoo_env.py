"""PettingZoo's environments, each as one `gymnasium.Env` that holds the agents of a group side by side. Imported in the
processes of environments; PettingZoo itself is not imported.

    observation   Rooted: g -> observation [n, ...], mask bool [n], action_mask bool [n, A] if there is one; state [...]
    action        Rooted: g -> action [n, ...]
    info          g.reward float32 [n, 1]; g.done, g.terminated, g.truncated bool [n, 1]: ("next", g, ...) of a batch

An agent acts where `mask` is True; in an AEC environment only the agent whose turn it is. When an agent dies, its last
observation is stored with a False mask; afterwards its observations are zeros, and its `action_mask` is True because a
distribution needs at least one legal action. An agent that a step does not mention has reward 0 and is terminated.

# n agents of a group
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from cormorant_worker.action_mask import ACTION_MASK, mask_length
from cormorant_worker.entrypoints import load_object
from cormorant_worker.envs.env_row import BadObservation
from cormorant_worker.envs.gymnasium_env import EnvFactory, check_same, construct, name_of, words_of
from cormorant_worker.envs.info import InfoField
from cormorant_worker.errors import EnvBuildError, EnvNotSaved
from cormorant_worker.spaces import Rooted, Space, leaves, unflattener

Groups = str | Mapping[str, Sequence[str]]
"""byName, all or perAgent; or the names of the agents of each group."""

_TAKEN = {
    "action", "collector", "done", "info", "is_init", "next", "observation", "reward", "state", "terminated",
    "truncated",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsFactory(EnvFactory):
    """`id` is a module with a `parallel_env` or an `env`; `entrypoint` returns a ParallelEnv or an AECEnv."""

    groups: Groups = "byName"
    ends_on_any: bool = False
    """An episode ends when its first agent ends, not its last one."""
    is_mean: bool = False
    """The team reward is the mean of the acting agents' rewards, not their sum."""

    def build(self, row: int = 0) -> "AgentsEnv":  # the same for every row
        """Construct it and its wrappers. Raises EnvBuildError where that fails, or its agents do not fit the groups."""
        module = self.id.replace("/", ".")
        try:
            make = load_object(self.entrypoint or f"{module}:parallel_env", what="environment")
        except EnvBuildError as error:
            if not self.id:
                raise
            try:
                make = load_object(f"{module}:env", what="environment")
            except EnvBuildError:
                raise error from None
        env = construct(partial(make, **self.kwargs), f"the environment {self.name}")
        for wrapper, kwargs in self.wrappers:
            env = construct(partial(load_object(wrapper, what="wrapper"), env, **kwargs), f"the wrapper {wrapper}")
        return AgentsEnv(env, self)


@dataclass(frozen=True, slots=True)
class MaybeAgents:
    """Calls a script's function that makes an environment, possibly a multi-agent one."""

    maker: Callable[[], Any]

    def __call__(self) -> Any:
        made = self.maker()
        has_agents = hasattr(made, "possible_agents") and callable(getattr(made, "observation_space", None))
        return AgentsEnv(made, AgentsFactory(entrypoint=name_of(self.maker))) if has_agents else made


def group_agents(agents: Sequence[str], groups: Groups) -> dict[str, tuple[str, ...]]:
    """The agents of each group. Raises EnvBuildError where a map does not name each once, or a name is taken."""
    if isinstance(groups, str):
        names: dict[str, Callable[[str], str]] = {
            "byName": lambda agent: re.sub(r"_\d+$", "", agent),
            "all": lambda agent: "agents",
            "perAgent": lambda agent: agent,
        }
        grouped: dict[str, tuple[str, ...]] = {}
        for agent in agents:
            name = names[groups](agent)
            grouped[name] = (*grouped.get(name, ()), agent)
    else:
        grouped = {name: tuple(members) for name, members in groups.items()}
        named = [agent for members in grouped.values() for agent in members]
        if sorted(named) != sorted(agents):
            has = f"groupMap has {', '.join(named)}, and the environment {', '.join(agents)}"
            raise EnvBuildError(f"{has}; write each agent into one group")
    if taken := sorted(_TAKEN & grouped.keys()):
        raise EnvBuildError(f"a group is called {taken[0]}, as another key of batches; name it otherwise in groups")
    return grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    keys: tuple[Any, ...]
    """The environment's own keys of these agents."""
    observed: Space
    """Observation space of one agent, without its action mask."""
    acts: Space
    """Action space of one agent."""
    action: Space
    """Action space of all of them."""
    mask_length: int
    """A: numbers in the action mask of one agent; 0: it has none."""
    nothing: Any
    """Zeros in place of an observation."""


class _Turns:
    """An AEC environment in the parallel API: one agent acts in a step, and all that are left see what it led to."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def agents(self) -> list[Any]:
        return [self._env.agent_selection] if self._env.agents else []

    def reset(self, **options: Any) -> tuple[Any, Any]:
        self._env.reset(**options)
        return self._what_is()[::4]

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        (action,) = actions.values()
        self._env.step(action)
        return self._what_is()

    def _what_is(self) -> tuple[Any, ...]:
        env = self._env
        obs = {agent: env.observe(agent) for agent in env.agents}
        found = obs, *(dict(part) for part in (env.rewards, env.terminations, env.truncations, env.infos))
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        return found


class AgentsEnv(gymnasium.Env[Any, Any]):
    """The agents of one environment of PettingZoo. Raises EnvBuildError where they fit no groups."""

    def __init__(self, env: Any, source: AgentsFactory) -> None:
        self._takes_turns = hasattr(env, "agent_iter")
        self._env, self._source = _Turns(env) if self._takes_turns else env, source
        self._known = {agent: str(agent) for agent in env.possible_agents}
        self._acting: set[Any] = set()
        self._steps = 0
        _, infos = self._env.reset(seed=0)  # masks may be in infos, which have no space
        keys = {name: agent for agent, name in self._known.items()}
        self._groups = {
            name: _describe(env, name, agents, tuple(keys[agent] for agent in agents), infos)
            for name, agents in group_agents(list(keys), source.groups).items()
        }
        observation = {
            name: observation_of_group(group.observed, len(group.keys), group.mask_length)
            for name, group in self._groups.items()
        }
        self._has_state = isinstance(getattr(env, "state_space", None), gymnasium.Space)
        self.observation_space = Rooted(observation | ({"state": env.state_space} if self._has_state else {}))
        self.action_space = Rooted({name: spaces.Dict({"action": g.action}) for name, g in self._groups.items()})
        for space in (self.observation_space, self.action_space):
            leaves(space, ())
        self.own_info = tuple(
            replace(field, agents=tuple(self._known[key] for key in group.keys))
            for name, group in self._groups.items()
            for field in fields_of_group(name, len(group.keys))
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self._env.reset(seed=seed, options=options)
        self._acting, self._steps = self._living(), 0
        return self._observe(obs, infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the acting agents. The reward is the team's."""
        acting, given = self._acting, dict[Any, Any]()
        for name, group in self._groups.items():
            values = action[name]["action"]
            parts = values.tolist() if isinstance(group.acts, spaces.Discrete) else iterate(group.action, values)
            given.update((key, part) for key, part in zip(group.keys, parts, strict=True) if key in acting)
        obs, rewards, terminations, truncations, infos = self._env.step(given)
        self._steps += 1
        living = self._living()
        if living and all(terminations.get(key) or truncations.get(key) for key in living):
            living = set()  # some environments leave agents that have all ended in their list
        self._acting = living
        seen, info = self._observe(obs, infos)
        for name, group in self._groups.items():
            terminated = np.array([[bool(terminations.get(key, key not in living))] for key in group.keys])
            truncated = np.array([[bool(truncations.get(key, False))] for key in group.keys])
            info[f"{name}.reward"] = np.array([[rewards.get(key, 0.0)] for key in group.keys], np.float32)
            info |= {
                f"{name}.done": terminated | truncated,
                f"{name}.terminated": terminated,
                f"{name}.truncated": truncated,
            }
        # Where all act at once, some environments go on to report those that are gone.
        present = set(rewards) if self._takes_turns else acting
        has_truncated = any(truncations.get(key, False) for key in present)
        if self._source.ends_on_any:
            has_terminated = any(terminations.get(key, False) for key in present)
        else:
            has_truncated &= not living
            has_terminated = not (living or has_truncated)
        reward = sum(float(part) for part in rewards.values())
        if self._source.is_mean:
            reward /= max(len(present), 1)
        is_late = 0 < self._source.max_episode_steps <= self._steps
        return seen, reward, has_terminated, has_truncated or is_late, info

    def get_state(self) -> dict[str, Any]:
        """The state of the environment, if it has `get_state` and `set_state`. Raises EnvNotSaved where it has not."""
        if not (hasattr(self._env, "get_state") and hasattr(self._env, "set_state")):
            raise EnvNotSaved(f"{self._source.name} has no get_state and set_state")
        return {"env": self._env.get_state(), "steps": self._steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._env.set_state(state["env"])
        self._acting, self._steps = self._living(), state["steps"]

    def close(self) -> None:
        self._env.close()

    def _living(self) -> set[Any]:
        living = set(self._env.agents)
        if unknown := living - self._known.keys():
            raise BadObservation(
                f"{self._source.name} has the agent {unknown.pop()}, which possible_agents does not have; name all "
                "agents there that may come"
            )
        return living

    def _observe(self, obs: Mapping[Any, Any], infos: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The observation of all groups, and the infos by the names of agents."""
        groups: dict[str, Any] = {}
        for name, group in self._groups.items():
            seen, masks = [], []
            for key in group.keys:
                if key not in obs and key in self._acting:
                    raise BadObservation(
                        f"{self._source.name} returned no observation of {key}, which is in its agents; return one, or "
                        "take it out of agents"
                    )
                own, mask = _split(obs[key]) if key in obs else (group.nothing, None)
                seen.append(own)
                if group.mask_length:
                    mask = infos.get(key, {}).get(ACTION_MASK) if mask is None else mask
                    is_free = mask is None or key not in self._acting
                    masks.append(np.ones(group.mask_length, np.bool_) if is_free else np.asarray(mask) != 0)
            is_acting = np.array([key in self._acting for key in group.keys])
            groups[name] = {"observation": _stacked(group.observed, seen), "mask": is_acting, ACTION_MASK: masks}
        if self._has_state:
            groups["state"] = self._env.state()
        return groups, {self._known[key]: info for key, info in infos.items() if key in self._known}


def _describe(env: Any, name: str, agents: tuple[str, ...], keys: tuple[Any, ...], infos: Mapping[Any, Any]) -> _Group:
    observed, acts = [[space(key) for key in keys] for space in (env.observation_space, env.action_space)]
    words = [words_of(*both) for both in zip(observed, acts, strict=True)]
    check_same(
        f"the agents of the group {name}",
        zip(agents, words, strict=True),
        remedy="set groups to byName, perAgent, or a map that puts agents with equal spaces together",
    )
    space, length = observed[0], mask_length(acts[0])
    has_mask = any(ACTION_MASK in infos.get(key, {}) for key in keys)
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        has_mask, space = True, _split(space.spaces, build=spaces.Dict)[0]
    zeros = unflattener(space)([np.zeros(leaf.shape, leaf.dtype) for leaf in leaves(space, ("observation",))])
    return _Group(
        keys=keys,
        observed=space,
        acts=acts[0],
        action=several(acts[0], len(agents)),
        mask_length=length if has_mask else 0,
        nothing=zeros,
    )


def _split(observed: Any, build: Callable[[Any], Any] = dict) -> tuple[Any, Any]:
    """An observation without its action mask, and the mask; None: it has none. What is alone in a dict is taken out."""
    if not isinstance(observed, Mapping) or ACTION_MASK not in observed:
        return observed, None
    rest = {key: part for key, part in observed.items() if key != ACTION_MASK}
    return rest["observation"] if list(rest) == ["observation"] else build(rest), observed[ACTION_MASK]


def fields_of_group(name: str, n: int) -> tuple[InfoField, ...]:
    """Info fields of a step of n agents: `name.reward`, `name.done` and so on."""
    dtypes = {"reward": "float32"} | dict.fromkeys(("done", "terminated", "truncated"), "bool")
    return tuple(
        InfoField(key=f"{name}.{what}", path=(name, what), dtype=dtype, shape=(n, 1)) for what, dtype in dtypes.items()
    )


def observation_of_group(observed: Space, n: int, mask_length: int) -> Space:
    """Observation space of n agents with an action mask of `mask_length` numbers each; 0: they have none."""
    parts: dict[str, Space] = {"observation": several(observed, n), "mask": spaces.Box(0, 1, (n,), np.bool_)}
    if mask_length:
        parts[ACTION_MASK] = spaces.Box(0, 1, (n, mask_length), np.bool_)
    return spaces.Dict(parts)


def several(space: Space, n: int) -> Space:
    """The space of n values of a space, side by side."""
    if isinstance(space, spaces.MultiDiscrete):  # gymnasium makes it a Box
        nvec, start = (np.repeat(np.asarray(part)[None], n, 0) for part in (space.nvec, space.start))
        return spaces.MultiDiscrete(nvec, dtype=space.dtype, start=start)
    return batch_space(space, n)


def _stacked(space: Space, items: list[Any]) -> Any:
    """One nested value of `several(space, n)` from n values of the space."""
    match space:
        case spaces.Dict():
            return {key: _stacked(part, [item[key] for item in items]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_stacked(part, [item[i] for item in items]) for i, part in enumerate(space.spaces))
    return items  # read as one array
