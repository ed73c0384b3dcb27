"""Random jobs with a policy for each group of agents, and the plain loop that says what their frames must be.

An agent's next observation shows its last action, and a policy's action is its version and the frames that it has
counted: together they tell who acted, whatever a batch says.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from cormorant_testing.agents import AGENTS, acts, is_truncated
from cormorant_testing.frame_loop import Frame, FrameLoop, Moment, Stream
from manifest_making import Document, collector_job

GROUPS: dict[str, Any] = {
    "byName": {"red": AGENTS[:2], "blue": AGENTS[2:3], "green": AGENTS[3:]},
    "perAgent": {agent: (agent,) for agent in AGENTS},
    "all": {"agents": AGENTS},
    "map": {"left": ("green_1", "red_0"), "right": ("blue_0", "red_1", "green_0")},
}
ENVS = 3
OWN: Document = {"entrypoint": f"{__name__}:make_policy", "kwargs": {"recurrent": False}}
DRAWN: dict[str, Document] = {
    "red": OWN,
    "blue": {"model": "red", "sample": {"window": 3, "latestRatio": 0.4}},
    "green": {"random": {}},
}
"""Policies of `byName`: blue plays versions of red's."""


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


def masking(observation: Any, action: Any) -> Any:
    """Entrypoint of the manifests: a policy that writes a key of the environment's."""
    return lambda seen: {"action": seen[:, :2], "mask": seen[:, 0]}


def weights_of(version: int, *, recurrent: bool) -> dict[str, Tensor]:
    """What is published as a version."""
    prefix = "net." if recurrent else ""
    return {f"{prefix}{name}": torch.full((1,), float(version)) for name in ("number", "copied")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyJob:
    groups: str = "byName"
    policies: Mapping[str, Document] = field(default_factory=dict)
    """By group; of others, nothing is known of who acts."""
    absences: str = ""
    ends: str = "all"
    crashes: int = 0
    subprocess: bool = False
    num_envs: int = ENVS
    warmup: int = 0
    cut: int = 0
    resets: bool = False
    max_steps: int = 0
    seed: int = 3
    staleness: int | None = None
    sync: bool = False
    workers: int = 1
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
            absences=chance.choice(["", "deaths", "returns"]),
            ends=chance.choice(["all", "all", "any"]),
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
        """Whether each is recurrent."""
        made = {name: one.get("kwargs") for name, one in self.policies.items()}
        return {name: kwargs["recurrent"] for name, kwargs in made.items() if kwargs}

    def manifest(self) -> Document:
        party: Document = {
            "entrypoint": "cormorant_testing.agents:Party",
            "kwargs": {"absences": self.absences, "crashes": self.crashes},
            "numEnvs": self.num_envs,
            "maxRestarts": 1000,
            "vectorization": "subprocess" if self.subprocess else "inline",
            "episodeEnds": self.ends,
        }
        named = {name: [*agents] for name, agents in self.members.items()}
        party |= {"groupMap": named} if self.groups == "map" else {"groups": self.groups}
        env: Document = {"pettingzoo": party, "maxEpisodeSteps": self.max_steps}
        collection: Document = {
            "framesPerBatch": self.num_envs * 8,
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
        policy = {"agents": dict(self.policies)} if self.policies else {"random": {}}
        spec = {"env": env, "policy": policy, "collection": collection, "replicas": self.workers}
        return collector_job("party", spec)


class PartyLoop(FrameLoop):
    """`take` every batch in the order of delivery; `publish` before a version is; `restored` after a state was."""

    def __init__(self, job: PartyJob) -> None:
        super().__init__(
            num_envs=job.num_envs,
            max_frames=job.cut,
            resets=job.resets,
            crashes=job.crashes > 0,
            gaps=job.staleness is not None,
            saves=True,
        )
        self.job, self.version, self.agent_steps = job, 0, 0
        self.published: dict[str, list[int]] = {model: [0] for model in job.models}
        self.played: dict[tuple[str, int], int] = {}
        """Versions by the group that draws them and by trajectory."""
        self.is_exact = True
        """A frame's policy knew every version up to the job's that acted; a slow worker of a fleet skips some."""

    def publish(self, models: list[str], version: int) -> dict[str, dict[str, Tensor]]:
        self.version = version
        for model in models:
            self.published[model].append(version)
        return {model: weights_of(version, recurrent=self.job.models[model]) for model in models}

    def _place(self, f: Frame, s: Stream) -> tuple[int | None, int, int]:
        seen = np.concatenate([f[f"{group}.observation"] for group in self.job.members])  # zeros of absent agents
        ident, episode, step = map(int, seen.max(0)[:3])
        return ident, episode, step

    def _resume(self, f: Frame, s: Stream, traj: int) -> None:
        super()._resume(f, s, traj)
        for group, one in self.job.policies.items():
            if s.following == {} and "sample" in one and (said := int(f[f"collector.{group}.policy_version"])) >= 0:
                self.played.setdefault((group, traj), said)  # it was drawn in a frame that is missing

    def _first(self, s: Stream) -> Mapping[str, Any]:
        return self._seen("", s, {})

    def _acting(self, s: Stream, step: int) -> list[str]:
        assert s.ident is not None
        return [agent for i, agent in enumerate(AGENTS) if acts(self.job.absences, s.ident, s.episode, step, i)]

    def _seen(self, where: str, s: Stream, did: Mapping[str, Any]) -> dict[str, Any]:
        """What is observed after `s.step` steps, the last with these actions."""
        living, told, values = self._acting(s, s.step), (s.ident, s.episode, s.step), dict[str, Any]()
        shown = dict.fromkeys(living, (0.0, 0.0)) | did
        for group, agents in self.job.members.items():
            seen = [[*told, *shown[agent]] if agent in shown else [0.0] * 5 for agent in agents]
            values[f"{where}{group}.observation"] = np.array(seen, np.float32)
            values[f"{where}{group}.mask"] = np.array([agent in living for agent in agents])
        return values | {f"{where}state": np.array([s.ident, s.step, len(living)], np.float32)}

    def _moment(self, f: Frame, s: Stream) -> Moment:
        acted, living = self._acting(s, s.step - 1), self._acting(s, s.step)
        self.agent_steps += len(acted)
        did, flags = dict[str, Any](), dict[str, tuple[bool, bool]]()
        for group, agents in self.job.members.items():
            did |= {agent: action for agent, action in zip(agents, f[f"{group}.action"], strict=True) if agent in acted}
        assert s.ident is not None
        for i, agent in enumerate(AGENTS):
            is_cut = agent in acted and is_truncated(s.ident, s.episode, s.step, i)
            flags[agent] = (False, False) if agent in living else (not is_cut, is_cut)
        terminated, truncated = ([flags[agent][i] for agent in acted] for i in range(2))
        is_any = self.job.ends == "any"
        has_truncated = any(truncated) and (is_any or not living)
        has_terminated = any(terminated) if is_any else not (living or has_truncated)
        values = self._seen("next.", s, did)
        is_cut, is_over = bool(f["next.truncated"]), bool(f["next.done"])
        for group, agents in self.job.members.items():
            # The end of the trajectory is that of all who had none of their own.
            both = [(not is_cut, is_cut) if is_over and not any(flags[agent]) else flags[agent] for agent in agents]
            ends = np.array(both)[..., None]
            values |= {f"next.{group}.terminated": ends[:, 0], f"next.{group}.truncated": ends[:, 1]}
            values[f"next.{group}.done"] = ends.any(1)
            rewards = [[did[agent][0] if agent in did else 0.0] for agent in agents]
            values[f"next.{group}.reward"] = np.array(rewards, np.float32)
        return Moment(values, has_terminated, has_truncated or s.step == self.job.max_steps)

    def _check_acting(self, f: Frame, s: Stream, version: int) -> None:
        assert version <= self.version, f"version {version}"
        for group, one in self.job.policies.items():
            self._check_group(f, s, group, one, version)

    def _check_group(self, f: Frame, s: Stream, group: str, one: Document, version: int) -> None:
        said, action = int(f[f"collector.{group}.policy_version"]), f[f"{group}.action"][f[f"{group}.mask"]]
        if version == -1 or "random" in one:
            assert said == -1, f"version {said} of random actions"
            assert not np.any(f.get(f"{group}.seen", 0)), "a random frame has outputs"
            assert len(np.unique(action)) == action.size, "random actions"
            self._check_count(f, s, f"{group}.count", 2.0, acts=False)
            return
        if one.get("entrypoint", "").endswith("scripted"):
            assert said == 0
            assert (action == [0.5, s.step]).all()
            return
        model = one.get("model", group)
        assert (action[:, 0] == said).all(), f"{group} acts with {action[:, 0]}, not {said}"
        assert self.job.models[model] == (f"{group}.count" in f)
        if self.job.models[model]:
            assert (action[:, 1:] == f[f"{group}.count"].max()).all(), f"{group} counts {action[:, 1]}"
        self._check_count(f, s, f"{group}.count", 2.0, acts=True)
        is_there = f[f"{group}.mask"]
        assert (f[f"{group}.seen"] == f[f"{group}.observation"][:, 2])[is_there].all(), f"{group} saw something else"
        known = [number for number in self.published[model] if number <= version]
        is_exact = self.is_exact or version == self.version
        if "sample" in one:
            if (group, s.traj) not in self.played:
                window = known[-one["sample"]["window"] :] if is_exact else known
                if one["sample"]["latestRatio"] == 1.0 and is_exact:
                    window = known[-1:]
                assert said in window, f"{group} draws {said} of {window}"
            drawn = self.played.setdefault((group, s.traj), said)
            assert drawn == said, f"{group} changes from {drawn} to {said}"
        else:
            at_most = min(version, one.get("version", version))
            expected = [number for number in known if number <= at_most]
            assert said == expected[-1] if is_exact else said in expected, f"{group} plays {said}, not {expected}"
