"""Random jobs with a policy for each group of agents, and the plain loop that says what their frames must be.

An agent's next observation shows its last action, and a policy's action is its version and the frames that it has
counted: together they tell who acted, whatever a batch says.

    observation [ident, episode, step, action[0], action[1]]
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from manifest_making import Document, collector_job

AGENTS = ("red_0", "red_1", "blue_0", "green_0", "green_1")
GROUPS: dict[str, Any] = {
    "byName": {"red": AGENTS[:2], "blue": AGENTS[2:3], "green": AGENTS[3:]},
    "perAgent": {agent: (agent,) for agent in AGENTS},
    "all": {"agents": AGENTS},
    "map": {"left": ("green_1", "red_0"), "right": ("blue_0", "red_1", "green_0")},
}
LONGEST, ENVS = 9, 3
_LOW, _HIGH = -1.0, float(2**20)


def length_of(ident: int, episode: int) -> int:
    return 1 + (ident * 7 + episode * 5) % LONGEST


def death_of(ident: int, episode: int, agent: int) -> int:
    """The step in which an agent dies, maybe after the episode."""
    return 1 + (ident + episode * 3 + agent * 4) % (2 * LONGEST)


class Party:
    """Agents that see their own last action; some die before the episode ends. `crashes`: a step of its life in which
    every second environment raises.
    """

    possible_agents = AGENTS

    def __init__(self, *, deaths: bool, crashes: int = 0) -> None:
        self._deaths, self._crashes = deaths, crashes
        self._ident, self._episode, self._step, self._life = 0, -1, 0, 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(_LOW, _HIGH, (5,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(_LOW, _HIGH, (2,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self._ident, self._episode = seed % 2**19, -1
        self._episode, self._step, self.agents = self._episode + 1, 0, [*AGENTS]
        return self._look(dict.fromkeys(AGENTS, (0.0, 0.0))), {agent: {} for agent in AGENTS}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        assert sorted(actions) == sorted(self.agents), "actions of agents that act"
        self._life += 1
        if self._life == self._crashes and self._ident % 2:
            raise OSError("the simulator died")
        self._step += 1
        acted, is_end = self.agents, self._step >= length_of(self._ident, self._episode)
        dead = {a: is_end or (self._deaths and self._dies(a)) for a in acted}
        self.agents = [agent for agent in acted if not dead[agent]]
        rewards = {agent: float(action[0]) for agent, action in actions.items()}
        return self._look(actions), rewards, dead, dict.fromkeys(acted, False), {agent: {} for agent in acted}

    def _dies(self, agent: str) -> bool:
        return self._step >= death_of(self._ident, self._episode, AGENTS.index(agent))

    def _look(self, did: Mapping[str, Any]) -> Any:
        told = self._ident, self._episode, self._step
        return {agent: np.array([*told, *action], np.float32) for agent, action in did.items()}

    def close(self) -> None:
        pass


class Counted(nn.Module):
    """Acts with its number; a buffer of it must be as old."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))
        self.register_buffer("copied", torch.zeros(1))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        assert torch.equal(self.number, self.copied), "weights of two versions"
        number = self.number.expand(len(observation), 1)
        return {"action": torch.cat([number, torch.zeros_like(number)], -1), "seen": observation[:, 2].clone()}


class CountedRecurrent(TensorDictModuleBase):
    """Counts the frames of a trajectory in which it acted, too."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation", "count"], ["action", "seen", ("next", "count")]
        self.net = Counted()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        told = self.net(tensordict["observation"])
        told["action"][:, 1:] = tensordict["count"]
        tensordict.update(told)
        tensordict["next", "count"] = tensordict["count"] + 1
        return tensordict

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        return {"count": torch.full((batch_size, 1), 2.0)}


def make_policy(observation: Any, action: Any, *, recurrent: bool) -> nn.Module:
    """Entrypoint of the manifests."""
    assert (observation.shape, action.shape) == ((5,), (2,)), "the spaces of one agent"
    return CountedRecurrent() if recurrent else Counted()


def scripted(observation: Any, action: Any) -> Any:
    """Entrypoint of the manifests: a policy without weights."""
    return lambda seen: torch.stack([torch.full((len(seen),), 0.5), seen[:, 2]], -1)


def weights_of(version: int, *, recurrent: bool) -> dict[str, Tensor]:
    """What is published as a version."""
    prefix = "net." if recurrent else ""
    return {f"{prefix}{name}": torch.full((1,), float(version)) for name in ("number", "copied")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyJob:
    groups: str
    policies: Mapping[str, Document]
    deaths: bool
    crashes: int
    subprocess: bool
    warmup: int
    cut: int
    resets: bool
    max_steps: int
    seed: int
    staleness: int | None
    sync: bool
    workers: int
    total: int = 0

    @classmethod
    def of(cls, chance: random.Random, *, is_fleet: bool) -> "PartyJob":
        groups = chance.choice([*GROUPS])
        names = chance.sample([*GROUPS[groups]], len(GROUPS[groups]))
        policies, makers = dict[str, Document](), list[str]()
        for name in names:
            kinds = ["random", "script", "own", "own", *(["other"] * 4 if makers else [])]
            match chance.choice(kinds):
                case "random":
                    policies[name] = {"random": {}}
                    continue
                case "script":
                    policies[name] = {"entrypoint": f"{__name__}:scripted"}
                    continue
                case "own":
                    kwargs = {"recurrent": chance.random() < 0.4}
                    one = policies[name] = {"entrypoint": f"{__name__}:make_policy", "kwargs": kwargs}
                    makers.append(name)
                case _:
                    one = policies[name] = {"model": chance.choice(makers)}
            match chance.choice(["newest", "pinned", "sample", "sample"]):
                case "pinned":
                    one["version"] = chance.randint(0, 12)
                case "sample":
                    ratio = chance.choice([0.0, 0.3, 1.0])
                    one["sample"] = {"window": chance.choice([1, 2, 3, 5]), "latestRatio": ratio}
        return cls(
            groups=groups,
            policies=policies,
            deaths=chance.random() < 0.5,
            crashes=chance.choice([0, 0, 0, 11]),
            subprocess=chance.random() < (0.3 if is_fleet else 0.02),
            warmup=chance.choice([0, 0, 0, 7, 20]),
            cut=chance.choice([0, 0, 0, 4]),
            resets=chance.random() < 0.2,
            max_steps=chance.choice([0, 0, 5]),
            seed=chance.randint(0, 1000),
            staleness=chance.choice([None, None, 0, 1]) if is_fleet else None,
            sync=is_fleet and chance.random() < 0.4,
            workers=chance.choice([1, 2]) if is_fleet else 1,
            total=chance.choice([0, ENVS * 60 + 2]) if is_fleet else 0,
        )

    @property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        return GROUPS[self.groups]

    @property
    def models(self) -> dict[str, bool]:
        made = {name: one.get("kwargs") for name, one in self.policies.items()}
        return {name: kwargs["recurrent"] for name, kwargs in made.items() if kwargs}

    def model_of(self, group: str) -> str:
        return self.policies[group].get("model", group)

    def manifest(self) -> Document:
        party: Document = {
            "entrypoint": f"{__name__}:Party",
            "kwargs": {"deaths": self.deaths, "crashes": self.crashes},
            "numEnvs": ENVS,
            "maxRestarts": 1000,
            "vectorization": "subprocess" if self.subprocess else "inline",
        }
        named = {name: [*agents] for name, agents in self.members.items()}
        party |= {"groupMap": named} if self.groups == "map" else {"groups": self.groups}
        env: Document = {"pettingzoo": party}
        if self.max_steps:
            env["maxEpisodeSteps"] = self.max_steps
        collection: Document = {
            "framesPerBatch": ENVS * 8,
            "seed": self.seed,
            "initRandomFrames": self.warmup,
            "maxFramesPerTrajectory": self.cut,
            "resetAtEachBatch": self.resets,
            "mode": "sync" if self.sync else "async",
        }
        if self.total:
            collection["totalFrames"] = self.total
        if self.staleness is not None:
            collection["weights"] = {"maxStaleness": self.staleness}
        spec = {"env": env, "policy": {"agents": dict(self.policies)}, "collection": collection}
        return collector_job("party", spec | {"replicas": self.workers})


@dataclass
class _Stream:
    """One environment of one worker."""

    following: dict[str, Any] | None = None
    """What each group observes next, and who acts; None: the start of an episode."""
    traj: int = -1
    length: int = 0
    drawn: dict[str, int] = field(default_factory=dict)
    """By group that draws, since its policy acts in this trajectory."""
    counts: dict[str, float] = field(default_factory=dict)
    is_new: bool = True
    """A worker's or a restored one: it begins anywhere."""
    newest: int = 0
    """Highest version of the job that acted."""


class PartyLoop:
    """`take` every batch in the order of delivery; `publish` before a version is."""

    def __init__(self, job: PartyJob) -> None:
        self.job, self.version, self.frames, self.random_frames = job, 0, 0, 0
        self.published: dict[str, list[int]] = {model: [0] for model in job.models}
        self.streams: dict[tuple[int, int], _Stream] = {}
        self.is_exact = True
        """A frame's policy knew every version up to the job's that acted; a slow worker of a fleet skips some."""
        self.may_miss = job.staleness is not None
        """Batches between two that are delivered."""
        self._ids: set[int] = set()

    def publish(self, models: list[str], version: int) -> dict[str, dict[str, Tensor]]:
        self.version = version
        for model in models:
            self.published[model].append(version)
        return {model: weights_of(version, recurrent=self.job.models[model]) for model in models}

    def restored(self) -> None:
        """All environments begin new episodes."""
        for stream in self.streams.values():
            stream.is_new = True

    def take(self, batch: Any) -> None:
        keys = {".".join(k) if isinstance(k, tuple) else k: k for k in batch.keys(True, True)}
        values = {name: batch[key].numpy() for name, key in keys.items()}
        mask = values.pop("collector.mask", np.ones(batch.shape, bool))
        for row, length in enumerate(mask.sum(1).tolist()):
            assert mask[row, :length].all(), "mask"
            for t in range(length):
                frame = {name: value[row, t] for name, value in values.items()}
                worker = int(frame["collector.traj_ids"]) >> 34
                stream = self.streams.setdefault((worker, row % ENVS), _Stream())
                try:
                    self._frame(frame, stream, is_first=t == 0, is_last=t == length - 1)
                except AssertionError as error:
                    error.add_note(f"row {row}, step {t}, after {self.frames} frames; {stream}; {frame}")
                    raise
        self.frames += int(mask.sum())

    def _frame(self, f: dict[str, Any], s: _Stream, *, is_first: bool, is_last: bool) -> None:
        job, traj = self.job, int(f["collector.traj_ids"])
        version = int(f["collector.policy_version"])
        seen = np.concatenate([f[f"{group}.observation"] for group in job.members])  # zeros of dead agents
        ident, episode, step = (int(n) for n in seen.max(0)[:3])
        if is_first and (self.may_miss or s.is_new):
            self._resume(f, s, traj, step)
        elif s.following is not None and traj != s.traj:
            assert (job.crashes > 0, is_first) == (True, True), "a trajectory that ends without a mark"
            s.following = None
        if s.following is None:
            assert traj not in self._ids, "an id begins twice"
            assert step == 0, "no start of an episode"
            s.traj, s.length, s.drawn, s.counts = traj, 0, {}, {}
            self._ids.add(traj)
        else:
            for key, value in s.following.items():
                np.testing.assert_array_equal(f[key], value, f"{key} is not what followed")
        s.is_new = False
        assert traj == s.traj, "trajectory id"
        assert bool(f["is_init"]) == (s.length == 0) if "is_init" in f else True, "is_init"
        assert s.newest <= version or version == -1, "an older version acts"
        s.newest = max(s.newest, version)
        self.random_frames += version < 0
        if version >= 0:
            self._check_newest(version)
        for group, agents in job.members.items():
            self._check_group(f, s, group, agents, version, told=(ident, episode, step))
        s.length += 1
        over = step + 1 >= length_of(ident, episode)
        dead = all(not f[f"next.{group}.mask"].any() for group in job.members)
        cut = s.length == job.cut or step + 1 == job.max_steps or (job.resets and is_last)
        ended = bool(f["next.terminated"]), bool(f["next.truncated"])
        assert bool(f["next.done"]) == any(ended)
        assert ended[0] == (over or dead), f"ended {ended}, over {over}, dead {dead}"
        is_crash = job.crashes > 0 and ended == (False, True)
        assert ended[1] == (cut and not ended[0]) or is_crash or (over and cut), f"ended {ended}, cut {cut}"
        names = [f"{group}.{part}" for group in job.members for part in ("observation", "mask")]
        s.following = None if any(ended) else {name: f[f"next.{name}"].copy() for name in names}

    def _resume(self, f: dict[str, Any], s: _Stream, traj: int, step: int) -> None:
        """Where the frames between are missing: a worker was killed, or a batch was too old."""
        if s.following is not None and traj == s.traj and all((f[k] == v).all() for k, v in s.following.items()):
            return
        if step == 0:
            s.following = None
            return
        assert self.may_miss, "no start of an episode"
        drawn = s.drawn if traj == s.traj else {}
        if traj != s.traj:
            assert traj not in self._ids, "an id goes on after its end"
            self._ids.add(traj)
            draws = [name for name, one in self.job.policies.items() if "sample" in one]
            unseen = {name: int(f[f"collector.{name}.policy_version"]) for name in draws}
            drawn = {name: version for name, version in unseen.items() if version >= 0}
        s.traj, s.length, s.drawn, s.following = traj, step, drawn, {}
        s.counts = {name: f[f"{name}.count"].max() for name in self.job.members if f"{name}.count" in f}

    def _check_newest(self, version: int) -> None:
        assert version in (0, *range(1, self.version + 1)), f"version {version}"

    def _check_group(
        self, f: dict[str, Any], s: _Stream, group: str, agents: tuple[str, ...], version: int, *, told: Any
    ) -> None:
        one, said = self.job.policies[group], int(f[f"collector.{group}.policy_version"])
        action, following = f[f"{group}.action"], f[f"next.{group}.observation"]
        acts = f[f"{group}.mask"]
        ident, episode, step = told
        for i, agent in enumerate(agents):
            lives = step == 0 or not self.job.deaths or step < death_of(ident, episode, AGENTS.index(agent))
            assert acts[i] == lives, f"{agent} acts"
            if acts[i]:
                np.testing.assert_array_equal(following[i], [ident, episode, step + 1, *action[i]], f"next of {agent}")
                assert f[f"next.{group}.reward"][i] == action[i][0], "reward"
        if version == -1 or "random" in one:
            assert said == -1, f"version {said} of random actions"
            assert not np.any(f.get(f"{group}.seen", 0)), "a random frame has outputs"
            assert len(np.unique(action[acts])) == action[acts].size, "random actions"
            s.counts[group] = 2.0
            return
        if one.get("entrypoint", "").endswith("scripted"):
            assert said == 0
            assert (action[acts] == [0.5, step]).all()
            return
        model = self.job.model_of(group)
        assert (action[acts, 0] == said).all(), f"{group} acts with {action[:, 0]}, not {said}"
        np.testing.assert_array_equal(f[f"{group}.seen"][acts], f[f"{group}.observation"][acts, 2])
        if self.job.models[model]:
            count = s.counts.get(group, 2.0)
            assert (action[acts, 1] == count).all(), f"{group} counts {action[:, 1]}, not {count}"
            for key, expected in ((f"{group}.count", count), (f"next.{group}.count", count + 1)):
                np.testing.assert_array_equal(f[key], np.full_like(f[key], expected), key)
            s.counts[group] = count + 1
        known = [number for number in self.published[model] if number <= version]
        is_exact = self.is_exact or version == self.version
        if "sample" in one:
            if group not in s.drawn:
                window = known[-one["sample"]["window"] :] if is_exact else known
                if one["sample"]["latestRatio"] == 1.0 and is_exact:
                    window = known[-1:]
                assert said in window, f"{group} draws {said} of {window}"
            assert s.drawn.setdefault(group, said) == said, f"{group} changes from {s.drawn[group]} to {said}"
        else:
            at_most = min(version, one.get("version", version))
            expected = [number for number in known if number <= at_most]
            assert said == expected[-1] if is_exact else said in expected, f"{group} plays {said}, not {expected}"
