"""What a dataset is of: its environment, its spaces and the leaves of its frames. Kept in `dataset.json`."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks import space_json
from cormorant_worker.sinks.schema import FORMAT_VERSION, KINDS, FrameSchema, column_name
from cormorant_worker.spaces import Leaf, Space, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDescription:
    """What every frame of a dataset has in common. The last four fields are notes: a rerun may differ in them."""

    env: Mapping[str, Any]
    """JSON values that tell environments apart, for example `{"envpool": {"taskId": "Pong-v5", "kwargs": {}}}`;
    without what may change from run to run, such as the number of environments."""
    observation_space: Space
    """Space of one environment."""
    action_space: Space
    schema: FrameSchema
    job: str = ""
    seed: int = 0
    manifest_sha256: str = ""
    """Digest of the manifest that created the dataset."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Anything else worth keeping, for example versions."""

    @classmethod
    def of(
        cls, env: Mapping[str, Any], observation_space: Space, action_space: Space, layout: Layout, **notes: Any
    ) -> "DatasetDescription":
        """Describe what a collector with this layout writes; `notes` are the remaining fields."""
        return cls(
            env=env,
            observation_space=observation_space,
            action_space=action_space,
            schema=FrameSchema.of(layout),
            **notes,
        )

    def to_bytes(self) -> bytes:
        value = {
            "format": "cormorant-shards",
            "formatVersion": FORMAT_VERSION,
            "job": self.job,
            "env": dict(self.env),
            "envSpec": "",  # v0.2.0 refuses a dataset without this key
            "observationSpace": space_json.to_json(self.observation_space),
            "actionSpace": space_json.to_json(self.action_space),
            "schema": self.schema.fingerprint(),
            "leaves": [
                {"kind": kind, "key": list(leaf.key), "shape": list(leaf.shape), "dtype": leaf.dtype.name}
                for kind, leaves in self.schema.kinds
                for leaf in leaves
            ],
            "seed": self.seed,
            "manifestSha256": self.manifest_sha256,
            "notes": dict(self.notes),
        }
        return (json.dumps(value, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "DatasetDescription":
        """Read `dataset.json`.

        Raises:
            DatasetCorrupt: it is not such a file, or a later version wrote it; the message begins with `where`.
        """
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
                observation_space=space_json.from_json(value["observationSpace"]),
                action_space=space_json.from_json(value["actionSpace"]),
                schema=FrameSchema(**{name: tuple(kinds[kind]) for kind, name in KINDS.items()}),
                job=value["job"],
                seed=value["seed"],
                manifest_sha256=value["manifestSha256"],
                notes=value["notes"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetCorrupt(f"{where} does not describe a dataset: {error!r}; restore it from a copy") from error

    def differences(self, new: "DatasetDescription") -> tuple[str, ...]:
        """What a rerun would store otherwise than this dataset: `env.envpool.taskId: "Pong-v5" is stored, now ...`."""
        found = [
            f"{path}: {json.dumps(old)} is stored, now it is {json.dumps(now)}"
            for path, old, now in _changes("env", json.loads(json.dumps(dict(self.env))), _plain(new.env))
        ]
        for name, old_space, new_space in (
            ("observation space", self.observation_space, new.observation_space),
            ("action space", self.action_space, new.action_space),
        ):
            if space_json.to_json(old_space) != space_json.to_json(new_space):
                old, now = describe(old_space), describe(new_space)
                now = f"{now}, with other bounds" if old == now else now
                found.append(f"{name}: {old} is stored, now it is {now}")
        for (kind, old_leaves), (_, new_leaves) in zip(self.schema.kinds, new.schema.kinds, strict=True):
            found += _leaf_changes(kind, old_leaves, new_leaves)
        return tuple(found)


def _plain(value: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(value)))


_ABSENT = "nothing"


def _changes(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            yield from _changes(f"{path}.{name}", old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old != new:
        yield path, old, new


def _leaf_changes(kind: str, old: tuple[Leaf, ...], new: tuple[Leaf, ...]) -> Iterator[str]:
    was = {column_name(leaf): f"{leaf.dtype.name} {list(leaf.shape)}" for leaf in old}
    now = {column_name(leaf): f"{leaf.dtype.name} {list(leaf.shape)}" for leaf in new}
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            yield f"{kind} {name}: {was.get(name, _ABSENT)} is stored, now it is {now.get(name, _ABSENT)}"
    if was == now and list(was) != list(now):
        yield f"{kind}: {', '.join(was)} are stored in this order, now it is {', '.join(now)}"


def describe_job(job: CollectorJob, layout: Layout, observation: Space, action: Space) -> DatasetDescription:
    """What a dataset says about the job that fills it; the same in the fleet and in its workers."""
    document = job.to_document()
    manifest = json.dumps(document, sort_keys=True).encode()
    return DatasetDescription.of(
        _describe_env(job),
        observation,
        action,
        layout,
        job=job.metadata.name,
        seed=job.spec.collection.seed,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )


def _describe_env(job: CollectorJob) -> dict[str, Any]:
    """What tells environments apart, and nothing of how many there are or who steps them."""
    env = job.spec.env
    limit: dict[str, Any] = {"maxEpisodeSteps": env.max_episode_steps}
    if env.variants:
        limit["variants"] = [
            {"id": task_id, "name": variant.name, "taskId": variant.task_id, "kwargs": dict(variant.kwargs)}
            for task_id, variant in enumerate(env.variants)
        ]
    if env.envpool is not None:
        return {"envpool": {"taskId": env.envpool.task_id, "kwargs": dict(env.envpool.kwargs)}, **limit}
    assert env.gymnasium is not None
    wrappers = [wrapper.to_document() for wrapper in env.gymnasium.wrappers]
    named = {"id": env.gymnasium.id} if env.gymnasium.id else {"entrypoint": env.gymnasium.entrypoint}
    return {"gymnasium": {**named, "kwargs": dict(env.gymnasium.kwargs), "wrappers": wrappers}, **limit}
