"""A job's Workload, as Kueue sees the job: quota is requested, reserved, admitted, taken back. Facts only.

pending -> admitted (pods exist) -> evicted (the job drains) -> released -> pending ...
                                 -> finished
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cormorant_operator import names


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Fields that Kueue adds to the pods of one pod set."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: "Placement") -> "Placement":
        return Placement(
            node_selector={**self.node_selector, **other.node_selector},
            tolerations=(*self.tolerations, *(new for new in other.tolerations if new not in self.tolerations)),
            labels={**self.labels, **other.labels},
            annotations={**self.annotations, **other.annotations},
        )


NO_PLACEMENT = Placement()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSet:
    """A pod set of a Workload, and what Kueue assigned to it."""

    asked: int
    """Number of pods that the Workload requests."""
    admitted: int = 0
    """Number of pods admitted; below the requested number only if the pod set has a minCount."""
    reclaimed: int = 0
    """Pods whose quota was given back early; never decreases while the quota is reserved."""
    flavors: tuple[str, ...] = ()
    update: Placement = NO_PLACEMENT
    """Additions of the admission checks."""

    @property
    def held(self) -> int:
        """Number of pods for which the quota is held."""
        return max(0, min(self.admitted, self.asked - self.reclaimed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    uid: str
    version: str
    created: datetime
    request: str = ""
    """Digest of the quota that it requests."""
    conditions: tuple[Mapping[str, Any], ...] = ()
    pod_sets: Mapping[str, PodSet] = field(default_factory=dict)

    def condition(self, kind: str) -> Mapping[str, Any]:
        return next((condition for condition in self.conditions if condition.get("type") == kind), {})

    def holds(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    @property
    def is_reserved(self) -> bool:
        return self.holds("QuotaReserved")

    @property
    def is_admitted(self) -> bool:
        return self.is_reserved and self.holds("Admitted") and not self.holds("Evicted")

    @property
    def admission(self) -> str:
        """Identifies one admission."""
        return f"{self.uid} {self.condition('Admitted').get('lastTransitionTime')}"

    @property
    def flavors(self) -> frozenset[str]:
        return frozenset(name for pod_set in self.pod_sets.values() for name in pod_set.flavors)

    def words_of(self, kind: str) -> str:
        """Reason and message of a condition."""
        condition = self.condition(kind)
        return ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))


def read_workload(raw: Mapping[str, Any]) -> Workload:
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    assignments = {item["name"]: item for item in (status.get("admission") or {}).get("podSetAssignments") or ()}
    reclaimed = {item["name"]: item["count"] for item in status.get("reclaimablePods") or ()}
    checks = status.get("admissionChecks") or ()
    updates: dict[str, Placement] = {}
    for update in (update for check in checks for update in check.get("podSetUpdates") or ()):
        updates[update["name"]] = updates.get(update["name"], NO_PLACEMENT) + _placement(update)
    pod_sets = {}
    for item in spec.get("podSets") or ():
        name, assignment = item["name"], assignments.get(item["name"], {})
        pod_sets[name] = PodSet(
            asked=item["count"],
            admitted=assignment.get("count", item["count"]) if assignment else 0,
            reclaimed=reclaimed.get(name, 0),
            flavors=tuple(sorted(set((assignment.get("flavors") or {}).values()))),
            update=updates.get(name, NO_PLACEMENT),
        )
    return Workload(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        request=(metadata.get("annotations") or {}).get(names.REQUEST, ""),
        conditions=tuple(status.get("conditions") or ()),
        pod_sets=pod_sets,
    )


def read_flavor(raw: Mapping[str, Any]) -> Placement:
    spec = raw.get("spec") or {}
    return _placement({"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")})


def _placement(update: Mapping[str, Any]) -> Placement:
    return Placement(
        node_selector=update.get("nodeSelector") or {},
        tolerations=tuple(update.get("tolerations") or ()),
        labels=update.get("labels") or {},
        annotations=update.get("annotations") or {},
    )
