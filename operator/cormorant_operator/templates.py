"""Digests of the input that pods are created from: a pod with another digest than the current one is outdated.

A digest covers the user's input, not the rendered pod or the API server's answer, so that an upgrade of
the operator alone replaces no pods. Raise `REVISION` to replace them anyway.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cormorant_contract.children import HEAD, WORKER
from cormorant_contract.spec import CollectorJobSpec
from cormorant_contract.workers import WorkerGroup
from cormorant_operator import names

REVISION = 1

_LIVE_FIELDS = ("suspend", "paused", "replicas", "elasticGroup", "runPolicy", "image", "code", "head")
"""Parts of the spec that do not require a new head, or that its own template covers."""
_LIVE_GROUP_FIELDS = ("replicas", "minReplicas", "maxReplicas", "resources", "template")
_LATER_POLICY_FIELDS = {"allowNonfinite": False, "compile": "off", "dtype": "float32"}
"""Fields of `spec.policy` added after v0.2.0, with their defaults: heads of that release keep running."""


_PLACED = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead")


def _placed(template: Mapping[str, Any]) -> Any:
    """The parts of a pod template that determine its resources and placement. The template may be invalid."""
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        return None
    containers = [
        (item.get("name"), item.get("resources"))
        for key in ("containers", "initContainers")
        for item in spec.get(key) or ()
        if isinstance(item, Mapping)
    ]
    return [spec.get(key) for key in ("resources", *_PLACED)], containers


@dataclass(frozen=True)
class Templates:
    """A spec and its digests, each computed once."""

    spec: CollectorJobSpec

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The spec as in a manifest. Do not change it."""
        return self.spec.to_document()

    @cached_property
    def text(self) -> str:
        # JSON is valid YAML, and has a canonical form.
        return json.dumps(self.document, sort_keys=True, indent=1)

    @cached_property
    def config(self) -> str:
        """Digest of the part of the spec that a head reads at its start."""
        document = {key: value for key, value in self.document.items() if key not in _LIVE_FIELDS}
        document["workerGroups"] = [
            {key: value for key, value in group.items() if key not in _LIVE_GROUP_FIELDS}
            for group in document["workerGroups"]
        ]
        document["policy"] = {
            key: value
            for key, value in document["policy"].items()
            if key not in _LATER_POLICY_FIELDS or value != _LATER_POLICY_FIELDS[key]
        }
        return names.digest(document)

    @cached_property
    def head(self) -> str:
        spec = self.spec
        return names.digest(REVISION, HEAD, spec.image, self._code, spec.head.to_document(), self.config)

    @cached_property
    def quota(self) -> str:
        """Digest of everything that Kueue counts and places by, except numbers of pods."""
        spec = self.spec
        head = (spec.head.resources, _placed(spec.head.template))
        groups = [(group.name, group.device, group.resources, _placed(group.template)) for group in spec.worker_groups]
        return names.digest(head, groups)

    def worker(self, group: WorkerGroup) -> str:
        return self._workers[group.name]

    @cached_property
    def _workers(self) -> Mapping[str, str]:
        dataset = self.spec.output.dataset
        secret = (dataset.secret,) if dataset is not None and dataset.secret else ()
        common = (REVISION, WORKER, self.spec.image, self._code, *secret)
        return {
            group.name: names.digest(*common, group.device, group.resources, group.template)
            for group in self.spec.worker_groups
        }

    @property
    def _code(self) -> str:
        code = self.spec.code
        return "" if code is None else code.config_map or f"image {code.image}"
