"""Small manifests, and changes of them, for tables of cases."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
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


def gymnasium(**fields: Any) -> Document:
    return manifest(env={"gymnasium": {"id": "CartPole-v1", "numEnvs": 8} | fields})


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


def _case(path: str, sentence: str, document: Document | None = None, *, by: str, value: Any = None) -> Case:
    """Without a document: of a manifest that has `value` at the path."""
    at = path.removeprefix("spec.").replace(".", "__")
    return Case(path, sentence, manifest(**{at: value}) if document is None else document, by)


schema, rule, strict = (partial(_case, by=by) for by in ("schema", "rule", "strict"))
