"""What pods are made from, as digests: a pod whose digest is another one than today's is outdated.

A digest is taken of what the user wrote, never of what is rendered from it or of what the API server made of that: an
upgrade of the operator alone replaces no pod. `REVISION` is raised when pods must be replaced all the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cormorant_contract.spec import CollectorJobSpec
from cormorant_contract.workers import WorkerGroup
from cormorant_operator import names

REVISION = 1

_LIVE_FIELDS = ("suspend", "paused", "replicas", "elasticGroup", "runPolicy", "image", "code", "head")
"""Parts of the spec that a running head needs not be replaced for, or that its template has already."""
_LIVE_GROUP_FIELDS = ("replicas", "minReplicas", "maxReplicas", "resources", "template")


@dataclass(frozen=True)
class Templates:
    """A spec, and the digests made of it: each once, however often the job is looked at."""

    spec: CollectorJobSpec

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The spec as a manifest holds it; not to be changed."""
        return self.spec.to_document()

    @cached_property
    def text(self) -> str:
        """The spec as JSON for people."""
        # JSON is YAML, and has one spelling.
        return json.dumps(self.document, sort_keys=True, indent=1)

    @cached_property
    def config(self) -> str:
        """Of the part of the manifest that a head reads once, when it starts."""
        document = {key: value for key, value in self.document.items() if key not in _LIVE_FIELDS}
        document["workerGroups"] = [
            {key: value for key, value in group.items() if key not in _LIVE_GROUP_FIELDS}
            for group in document["workerGroups"]
        ]
        return names.digest(document)

    @cached_property
    def head(self) -> str:
        spec = self.spec
        return names.digest(REVISION, names.HEAD, spec.image, self._code, spec.head.to_document(), self.config)

    def worker(self, group: WorkerGroup) -> str:
        return self._workers[group.name]

    @cached_property
    def _workers(self) -> Mapping[str, str]:
        common = (REVISION, names.WORKER, self.spec.image, self._code)
        return {
            group.name: names.digest(*common, group.device, group.resources, group.template)
            for group in self.spec.worker_groups
        }

    @property
    def _code(self) -> str:
        return self.spec.code.config_map if self.spec.code is not None else ""
