"""Kueue as plain values: one Workload that is admitted and evicted when a test says so."""

from collections.abc import Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any

from cormorant_operator.decide.plan import ApplyChild, PatchWorkload, ReadQueueObject
from cormorant_operator.job_state import JobState, RefusalKind
from cormorant_operator.names import Manifest
from cormorant_operator.pods import write_time
from cormorant_operator.workload import Workload, read_flavor, read_workload


class Kueue:
    def __init__(self) -> None:
        self.raw: Manifest | None = None
        """The Workload as the API server holds it."""
        self.node_labels: dict[str, str] = {}
        """Of the flavor `spot`."""
        self.classes: dict[str, int] = {}
        """WorkloadPriorityClasses that exist."""
        self.requests = 0
        self._version = 0

    @property
    def workload(self) -> Workload | None:
        return read_workload(self.raw) if self.raw is not None else None

    @property
    def status(self) -> dict[str, Any]:
        assert self.raw is not None
        return dict(self.raw.setdefault("status", {}))

    def condition(self, kind: str) -> str:
        """`True/Reason`; empty if there is none."""
        found = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), None)
        return f"{found['status']}/{found['reason']}" if found is not None else ""

    # -- the operator ------------------------------------------------------------------------------------------

    def apply(self, action: ApplyChild, at: datetime) -> None:
        self.requests += 1
        before = self.raw or {"metadata": {"uid": f"w{self._version}", "creationTimestamp": write_time(at)}}
        metadata = {**before["metadata"], **action.manifest["metadata"]}
        self._store({**deepcopy(action.manifest), "metadata": metadata, "status": before.get("status", {})})

    def patch(self, action: PatchWorkload) -> None:
        self.requests += 1
        assert self.raw is not None
        assert action.workload.version == self.raw["metadata"]["resourceVersion"], "an outdated write"
        changed = {**self.status, **deepcopy(dict(action.status))}
        self._store({**self.raw, "status": {key: value for key, value in changed.items() if value is not None}})

    def read(self, action: ReadQueueObject, known: JobState, at: datetime) -> None:
        self.requests += 1
        if action.kind == "ResourceFlavor":
            known.flavors[action.name, action.admission] = read_flavor({"spec": {"nodeLabels": self.node_labels}})
        elif action.name in self.classes:
            known.priorities[action.name] = self.classes[action.name]
        else:
            known.refuse(action.kind, RefusalKind.FORBIDDEN, f"there is no {action.kind} {action.name}", at=at)

    # -- Kueue -------------------------------------------------------------------------------------------------

    def admit(self, at: datetime, counts: Mapping[str, int] | None = None, **status: Any) -> None:
        """Reserve quota of the flavor `spot` and admit; `counts`: pod sets that get fewer pods than asked for."""
        assert self.raw is not None
        assignments = [
            {
                "name": item["name"],
                "count": (counts or {}).get(item["name"], item["count"]),
                "flavors": {"cpu": "spot", "memory": "spot"},
            }
            for item in self.raw["spec"]["podSets"]
        ]
        admission = {"clusterQueue": "cq", "podSetAssignments": assignments}
        news = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
        if self.condition("Evicted"):
            news["Evicted"] = ("False", "QuotaReserved")
        self._say(news, at, admission=admission, **status)

    def hold(self, message: str, at: datetime) -> None:
        self._say({"QuotaReserved": ("False", "Pending")}, at, message)

    def evict(self, at: datetime, reason: str = "Preempted") -> None:
        self._say({"Evicted": ("True", reason)}, at, f"{reason} to accommodate another workload")

    def _say(self, news: Mapping[str, tuple[str, str]], at: datetime, message: str = "", **status: Any) -> None:
        assert self.raw is not None
        kept = [c for c in self.status.get("conditions", ()) if c["type"] not in news]
        said = [
            {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": write_time(at)}
            for kind, (value, reason) in news.items()
        ]
        self._store({**self.raw, "status": {**self.status, "conditions": [*kept, *said], **status}})

    def _store(self, raw: Manifest) -> None:
        self._version += 1
        self.raw = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self._version)}}
