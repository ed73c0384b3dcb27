"""Description of a dataset, stored in `dataset.json`: its environment, its spaces and the leaves of its frames."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from cormorant_contract.job import CollectorJob
from cormorant_contract.spaces import space_from_json, space_to_json
from cormorant_worker.collect.block import Layout
from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.schema import FORMAT_VERSION, KINDS, FrameSchema
from cormorant_worker.spaces import Leaf, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDescription:
    """Properties common to all frames of a dataset. The last four fields are notes: a rerun may differ in them."""

    env: Mapping[str, Any]
    """JSON values that tell environments apart, for example `{"envpool": {"taskId": "Pong-v5", "kwargs": {}}}`;
    without values that may change from run to run, such as the number of environments."""
    observation_space: Space
    """Space of one environment."""
    action_space: Space
    schema: FrameSchema
    job: str = ""
    seed: int = 0
    manifest_sha256: str = ""
    """Digest of the manifest that created the dataset."""
    env_spec: str = ""
    """Gymnasium's EnvSpec of the environment, as JSON; empty where `gymnasium.make` cannot build it."""

    def to_bytes(self) -> bytes:
        value = {
            "format": "cormorant-shards",
            "formatVersion": FORMAT_VERSION,
            "job": self.job,
            "env": dict(self.env),
            "envSpec": self.env_spec,
            "observationSpace": space_to_json(self.observation_space),
            "actionSpace": space_to_json(self.action_space),
            "schema": self.schema.fingerprint(),
            "leaves": [
                {"kind": kind, "key": list(leaf.key), "shape": list(leaf.shape), "dtype": leaf.dtype.name}
                for kind, leaves in self.schema.kinds
                for leaf in leaves
            ],
            "seed": self.seed,
            "manifestSha256": self.manifest_sha256,
            "notes": {},
        }
        return (json.dumps(value, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "DatasetDescription":
        """Read `dataset.json`. Raises DatasetCorrupt where it is something else, or of a later version."""
        try:
            value = json.loads(data)
            if value["formatVersion"] != FORMAT_VERSION:
                raise DatasetCorrupt(
                    f"{where} has format version {value['formatVersion']}, this version reads {FORMAT_VERSION}; "
                    "read it with the version that wrote it"
                )
            kinds: dict[str, list[Leaf]] = {kind: [] for kind in KINDS}
            for leaf in value["leaves"]:
                kinds[leaf["kind"]].append(
                    Leaf(key=tuple(leaf["key"]), shape=tuple(leaf["shape"]), dtype=np.dtype(leaf["dtype"]))
                )
            return cls(
                env=value["env"],
                observation_space=space_from_json(value["observationSpace"]),
                action_space=space_from_json(value["actionSpace"]),
                schema=FrameSchema(**{name: tuple(kinds[kind]) for kind, name in KINDS.items()}),
                job=value["job"],
                seed=value["seed"],
                manifest_sha256=value["manifestSha256"],
                env_spec=value.get("envSpec", ""),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetCorrupt(f"{where} does not describe a dataset: {error!r}; restore it from a copy") from error

    def differences(self, new: "DatasetDescription") -> tuple[str, ...]:
        """Fields that a rerun would store differently: `env.envpool: {"taskId": ...} is stored, now it is ...`."""
        ours, theirs = self._compared(), new._compared()
        names = dict.fromkeys((*ours, *theirs))
        pairs = ((name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in names)
        return tuple(f"{name}: {old} is stored, now it is {now}" for name, old, now in pairs if old != now)

    def _compared(self) -> dict[str, str]:
        """Texts of the values that must be equal, by their names in messages."""
        compared = {f"env.{name}": json.dumps(block, sort_keys=True) for name, block in self.env.items()}
        for name, space in (("observation space", self.observation_space), ("action space", self.action_space)):
            compared[name] = json.dumps(space_to_json(space))
        for kind, leaves in self.schema.kinds:
            shown = ", ".join(f"{list(leaf.key)} {leaf.dtype.name} {list(leaf.shape)}" for leaf in leaves)
            compared[f"{kind} leaves"] = shown or "nothing"
        return compared


def describe_job(job: CollectorJob, layout: Layout, observation: Space, action: Space) -> DatasetDescription:
    """The description for the dataset of a job; equal in the fleet and in its workers."""
    manifest = json.dumps(job.to_document(), sort_keys=True).encode()
    env = job.spec.env
    # Without the fields that say how many environments there are and how they are stepped.
    identity = {env.block.kind: env.block.identity(), "maxEpisodeSteps": env.max_episode_steps}
    if env.variants:
        identity["variants"] = [
            {"id": task_id, "name": variant.name, "taskId": variant.task_id, "kwargs": dict(variant.kwargs)}
            for task_id, variant in enumerate(env.variants)
        ]
    return DatasetDescription(
        env=identity,
        observation_space=observation,
        action_space=action,
        schema=FrameSchema.of(layout),
        job=job.metadata.name,
        seed=job.spec.collection.seed,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        env_spec=_env_spec(job),
    )


def _env_spec(job: CollectorJob) -> str:
    """Arguments of `gymnasium.make` as JSON; empty for batches of EnvPool, objects of a script, unknown ids, and ids
    registered with values that JSON has not.
    """
    env = job.spec.env.gymnasium
    entrypoint = (env and env.entrypoint) or ""
    if env is None or entrypoint.startswith("script:"):
        return ""
    wrappers = tuple(
        WrapperSpec(name=w.entrypoint.partition(":")[2], entry_point=w.entrypoint, kwargs=dict(w.kwargs))
        for w in env.wrappers
    )
    try:
        name = entrypoint.partition(":")[2].replace(".", "-")
        spec = gymnasium.spec(env.id) if env.id else EnvSpec(f"{name}-v0", entrypoint)
        kwargs = {**spec.kwargs, **env.kwargs}
        limit = job.spec.env.max_episode_steps or spec.max_episode_steps
        return replace(spec, kwargs=kwargs, max_episode_steps=limit, additional_wrappers=wrappers).to_json()
    except (gymnasium.error.Error, ImportError, ValueError, TypeError):
        return ""
