"""Policies of groups of agents (`spec.policy.agents`): one actor that calls each group's own policy.

A group's policy is one for a single agent: it gets the rows of all agents of the group at once, and its outputs get
keys below the group's. Old versions of a model act with tensors that are kept for them:

    offered -> recorded -> acts for the rows that play it -> forgotten, when no row plays it and no group may draw it

# R rows, n agents of a group
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from cormorant_contract.policy import AgentPolicy, Policy
from cormorant_worker.errors import ManifestError, PolicyLoadError
from cormorant_worker.policy.actor import MAIN_MODEL, Acted, PolicyActor, PolicyModels, load_policy
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, Leaf, Space, describe, leaf_spaces, leaves, put, with_leaves
from cormorant_worker.weights.blob import read_file
from cormorant_worker.weights.staged import (
    INITIAL_VERSION,
    RANDOM_VERSION,
    PolicyVersion,
    StagedWeights,
    Weights,
    specs_of_tensors,
    tensors_of,
    verify,
)

_NOT_DRAWN = -1
"""In place of the version that a row plays."""


@dataclass(slots=True, kw_only=True)
class _Group:
    policy: AgentPolicy
    model: str
    num_agents: int
    sees: list[int]
    """Leaves of the observation that its policy gets."""
    acts: list[int]
    """Leaves of the action."""
    actor: PolicyActor | None = None
    """The weights that were applied last; None: random actions."""
    past: dict[int, PolicyActor] = field(default_factory=dict)
    """Older versions, made when they first act."""
    states: slice = field(default_factory=lambda: slice(0, 0))
    """Its recurrent states."""
    drawn: int = -1
    """Index of the state with the version that a row drew."""


class AgentsActor:
    """Acts for all groups of agents of an environment."""

    def __init__(
        self,
        policy: Policy,
        observation: Space,
        action: Space,
        random: RandomActor,
        *,
        device: torch.device,
        num_rows: int,
    ) -> None:
        """Make each group's policy. `random` draws the actions of random groups, and its generator versions; `num_rows`
        environments act at once. Raises ManifestError where the environment has other groups, and PolicyError,
        PolicyMismatch or PolicyLoadError where a policy cannot be made.
        """
        self.device = device
        self._policy, self._random = policy, random
        agents = policy.agents or {}
        seen, acts = leaves(observation, ("observation",)), leaves(action, ("action",))
        groups: dict[str, tuple[Any, Any]] = {}
        if isinstance(observation, spaces.Dict) and isinstance(action, spaces.Dict):
            parts = observation.spaces.items()
            groups = {name: (part, action[name]) for name, part in parts if "mask" in getattr(part, "spaces", ())}
        if sorted(groups) != sorted(agents):
            raise ManifestError(
                f"policy.agents has {', '.join(sorted(agents))}, but the environment's groups are "
                f"{', '.join(sorted(groups)) or 'none'}; write one policy for each of them"
            )
        made: dict[str, tuple[PolicyModels, str]] = {}
        self._groups: dict[str, _Group] = {}
        # Models first: others act with them.
        for name in sorted(groups, key=lambda group: agents[group].model or ""):
            one, sees = agents[name], dict(groups[name][0].spaces)
            n = sees.pop("mask").shape[0]
            seen_space = sees["observation"] if len(sees) == 1 else spaces.Dict(sees)
            of_one = of_one_agent(seen_space), of_one_agent(groups[name][1]["action"])
            group = self._groups[name] = _Group(
                policy=one,
                model=one.model or name,
                num_agents=n,
                sees=[i for i, leaf in enumerate(seen) if leaf.key[0] == name and leaf.key[1] != "mask"],
                acts=[i for i, leaf in enumerate(acts) if leaf.key[0] == name],
            )
            if one.random is not None:
                continue
            words = " and ".join(map(describe, of_one))
            if one.entrypoint is not None:
                models = load_policy(one.entrypoint, one.kwargs, *of_one)
                if len(models.modules) > 1:
                    raise PolicyLoadError(
                        f"{one.entrypoint} returned the modules {', '.join(models.modules)}; return the one that acts "
                        f"for the group {name}"
                    )
                own = {name: module for module in models.modules.values()}  # noqa: B035  # at most one
                made[name] = PolicyModels(models.acting, own), words
            models, other = made[group.model]
            if words != other:
                raise ManifestError(
                    f"the group {name} has the spaces {words}, and the group {group.model}, whose model it names, "
                    f"{other}; give it an entrypoint of its own"
                )
            if not models.modules and (one.version, one.sample) != (None, None):
                raise ManifestError(
                    f"policy.agents.{name} has version or sample, but its policy has no weights; return a torch "
                    "module, or remove them"
                )
            group.actor = PolicyActor(models, *of_one, device=device, num_rows=num_rows * n)
        self._groups = {name: self._groups[name] for name in groups}
        self._random_leaves = [i for group in self._groups.values() if group.actor is None for i in group.acts]
        """Leaves of the action of groups whose actions are random."""
        self._is_random = len(self._random_leaves) == len(acts)
        self.weights = StagedWeights({name: m for models, _ in made.values() for name, m in models.modules.items()})
        self._lay_out()
        self.playing: Callable[[], Sequence[Array]] = list
        """Returns the versions that rows play now, which are not forgotten."""
        self._history: dict[str, dict[int, Mapping[str, torch.Tensor]]] = {
            model: {} for model in self.weights.specs if policy.versions_kept(model, [0])
        }
        self._offered: dict[str, dict[int, Mapping[str, torch.Tensor]]] = {model: {} for model in self._history}
        """Versions that are not in the history yet, by model. Written by the thread that offers."""
        self._lock = threading.Lock()
        """Guards `_offered`."""
        self.weights.on_offered = self._take
        if uri := policy.initial_weights:
            self.weights.load(read_file(uri, allow_nonfinite=policy.allow_nonfinite), where=f" in {uri}")
        self._take(INITIAL_VERSION, self.weights.current())  # to the device

    def _lay_out(self) -> None:
        outputs, states, initial, drawn = list[Leaf](), list[Leaf](), list[Array](), list[_Group]()
        for name, group in self._groups.items():

            def beside(leaf: Leaf, name: str = name, n: int = group.num_agents) -> Leaf:
                return Leaf(key=(name, *leaf.key), shape=(n, *leaf.shape), dtype=leaf.dtype)

            if (actor := group.actor) is not None:
                outputs += map(beside, actor.outputs)
                group.states = slice(len(states), len(states) + len(actor.states))
                states += map(beside, actor.states)
                initial += (value.repeat(group.num_agents, 0)[None] for value in actor.initial_states)
            key = ("collector", name, "policy_version")
            outputs.append(Leaf(key=key, shape=(), dtype=np.dtype(np.int64)))
            drawn += [group] if group.policy.sample is not None else []
        for index, group in enumerate(drawn, start=len(states)):
            group.drawn = index
        self.outputs, self.states = tuple(outputs), tuple(states)
        self.initial_states: Arrays = (*initial, *(np.array([_NOT_DRAWN]) for _ in drawn))

    def twin(self, random: RandomActor) -> "AgentsActor":
        """An actor with the same weights, for one episode; `random` draws its random actions."""
        twin = copy.copy(self)
        twin._random = random
        twin._groups = {
            name: replace(group, actor=group.actor and group.actor.twin(), past={})
            for name, group in self._groups.items()
        }
        return twin

    def load(self, name: str, weights: Weights, *, where: str) -> None:
        """Let a group act with weights of its own from now on, also one that shares a model. It takes those of its
        model, or those that carry no model's name. Raises WeightsMismatch where they do not fit, with `where` in the
        message; the group is not changed.
        """
        group = self._groups[name]
        if group.actor is not None and group.actor.models.modules:
            own = weights.get(group.model) or weights.get(MAIN_MODEL, {})
            verify(specs_of_tensors({group.model: own}), self.weights.specs, only=group.model, where=where)
            copied = {key: tensor.detach().to(self.device, copy=True) for key, tensor in own.items()}
            group.actor = self._at(group.actor, copied)

    def refuse_scripts(self) -> None:
        """Raise ManifestError where a policy has no weights: it cannot play one of several checkpoints."""
        for name, group in self._groups.items():
            if group.actor is not None and not group.actor.models.modules:
                raise ManifestError(
                    f"the policy of the group {name} has no weights, so there is nothing to pair checkpoints with; "
                    "evaluate one file at a time"
                )

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """See `Actor`. The states behind those of policies are the versions that were drawn."""
        if any(self._offered.values()):
            self._record()
        rows = len(is_init)
        actions = self._random.choose(obs, rows, self._random_leaves) if self._random_leaves else {}
        outputs, after = list[Array](), list(states)
        for group in self._groups.values():
            if group.actor is None:
                outputs.append(np.full(rows, RANDOM_VERSION))
                continue
            versions = self._choose(group, states, rows)
            acted = self._act(group, versions, tuple(obs[i] for i in group.sees), states[group.states], is_init)
            actions |= dict(zip(group.acts, acted.actions, strict=True))
            outputs += (*acted.outputs, versions)
            after[group.states] = acted.states
            if group.drawn >= 0:
                after[group.drawn] = versions
        own = np.full(rows, RANDOM_VERSION) if self._is_random else None
        return Acted(tuple(actions[i] for i in range(len(actions))), tuple(outputs), tuple(after), own)

    def _choose(self, group: _Group, states: Arrays, rows: int) -> Array:
        """[R] the version that acts in each row."""
        newest: int = self.weights.versions.get(group.model, INITIAL_VERSION)
        known = self._history.get(group.model, {})
        if (sample := group.policy.sample) is not None:
            versions = states[group.drawn].copy()
            # A restored state may be older than all that this process has seen.
            missing = np.flatnonzero(~np.isin(versions, [*known]))
            if len(missing):
                generator = self._random.generator
                drawn = generator.choice(
                    [number for number in known if number <= newest][-sample.window :], len(missing)
                )
                versions[missing] = np.where(generator.random(len(missing)) < sample.latest_ratio, newest, drawn)
            return versions
        if (pinned := group.policy.version) is not None:
            newest = max(number for number in known if number <= min(newest, pinned))
        return np.full(rows, newest)

    def _act(self, group: _Group, versions: Array, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """Act for all rows, with one call for each version."""
        whole: list[Arrays] = []
        for version in np.unique(versions).tolist():
            at = np.flatnonzero(versions == version)
            if len(at) == len(versions):
                return self._call(group, version, obs, states, is_init)
            part_obs, part_states = (tuple(a[at] for a in arrays) for arrays in (obs, states))
            part = self._call(group, version, part_obs, part_states, is_init[at])
            pieces = part.actions, part.outputs, part.states
            whole = whole or [tuple(np.empty((len(versions), *a.shape[1:]), a.dtype) for a in of) for of in pieces]
            for stored, piece in zip(whole, pieces, strict=True):
                put(stored, at, piece)
        actions, outputs, after = whole
        return Acted(actions, outputs, after)

    def _call(self, group: _Group, version: int, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        actor, n = group.actor, group.num_agents
        assert actor is not None
        if version != self.weights.versions.get(group.model, INITIAL_VERSION):
            if version not in group.past:
                group.past[version] = self._at(actor, self._history[group.model][version])
            actor = group.past[version]

        def flat(arrays: Arrays) -> Arrays:
            return tuple(a.reshape(-1, *a.shape[2:]) for a in arrays)

        def shaped(arrays: Arrays) -> Arrays:
            return tuple(a.reshape(-1, n, *a.shape[1:]) for a in arrays)

        acted = actor.act(flat(obs), flat(states), is_init.repeat(n))
        return Acted(shaped(acted.actions), shaped(acted.outputs), shaped(acted.states))

    def _at(self, actor: PolicyActor, weights: Mapping[str, torch.Tensor]) -> PolicyActor:
        """The actor with other weights, whose memory it takes."""
        (module,) = actor.models.modules.values()
        instead = dict[int, torch.Tensor]()
        for name, own in tensors_of(module).items():
            is_parameter = isinstance(own, torch.nn.Parameter)
            instead[id(own)] = torch.nn.Parameter(weights[name], requires_grad=False) if is_parameter else weights[name]
        return actor.twin(instead)

    # -- old versions ------------------------------------------------------------------------------------------

    def _take(self, version: PolicyVersion, weights: Weights) -> None:
        """Keep offered weights, whose memory is the sender's, and of those that wait only what may still act: a worker
        that is paused records none. Called by the thread that offers, while nothing is applied.
        """
        for model in self._history.keys() & weights.keys():
            copied = {name: tensor.detach().to(self.device, copy=True) for name, tensor in weights[model].items()}
            with self._lock:
                offered = self._offered[model] | {version: copied}
                applied = self.weights.versions[model]
                kept: set[int] = {version, applied}
                for numbers in ([*offered], [number for number in offered if number <= applied]):
                    kept |= self._policy.versions_kept(model, numbers)
                self._offered[model] = {number: offered[number] for number in offered if number in kept}

    def _record(self) -> None:
        playing = {int(number) for array in self.playing() for number in array.flat}
        for model, history in self._history.items():
            with self._lock:
                history.update(self._offered[model])
                self._offered[model] = {}
            newest = self.weights.versions[model]
            kept = self._policy.versions_kept(model, [number for number in history if number <= newest])
            for number in [number for number in history if number < newest and number not in kept | playing]:
                del history[number]
                for group in self._groups.values():
                    if group.model == model:
                        group.past.pop(number, None)


def of_one_agent(space: Space) -> Space:
    """The space of one agent, from that of several side by side (`envs.pettingzoo_env.several`)."""
    return with_leaves(space, map(_first, leaf_spaces(space)))


def _first(space: Space) -> Space:
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim == 1:
            return spaces.Discrete(space.nvec[0], start=space.start[0])
        return spaces.MultiDiscrete(space.nvec[0], dtype=space.dtype, start=space.start[0])
    assert isinstance(space, spaces.Box)
    return spaces.Box(space.low[0], space.high[0], dtype=space.dtype)
