"""Small manifests, and changes of them, for tables of cases."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
ABSENT = object()


def collector_job(name: str, spec: Document, **metadata: Any) -> Document:
    metadata = {"name": name, **metadata}
    return {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "metadata": metadata, "spec": spec}


def manifest(name: str = "pong", /, **changes: Any) -> Document:
    """A small valid manifest with changes below spec: `manifest(env__envpool__numEnvs=0)`."""
    env, policy = {"envpool": {"taskId": "Pong-v5", "numEnvs": 8}}, {"random": {}}
    document = collector_job(name, {"env": env, "policy": policy, "collection": {"framesPerBatch": 64}})
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = deepcopy(value)
    return document


def gymnasium(*, env: Document | None = None, policy: Document | None = None, **fields: Any) -> Document:
    """`fields` are the block's, `env` what stands beside it."""
    block = {"gymnasium": {"id": "CartPole-v1", "numEnvs": 8} | fields}
    return manifest(env=block | (env or {}), policy=policy or {"random": {}})


def groups(*worker_groups: Document, **changes: Any) -> Document:
    return manifest(workerGroups=list(worker_groups), **changes)


@dataclass(frozen=True, slots=True)
class Case:
    path: str
    """The field that every message names."""
    sentence: str
    """A part of what `cormorant validate` says of it."""
    document: Document
    by: str
    """Who refuses it at the API server: schema, rule, or strict (unknown fields, refused with strict validation)."""

    def __str__(self) -> str:
        return f"{self.path}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class At:
    """In place of a document: the small manifest with this value at the path of its row."""

    value: Any

    def beside(self, path: str) -> Document:
        return manifest(**{path.removeprefix("spec.").replace(".", "__"): self.value})
