"""Kueue as plain values: one Workload that is admitted and evicted when a test says so."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from cormorant_operator.names import Manifest
from cormorant_operator.pods import write_time
from cormorant_operator.workload import Workload, read_workload
from cormorant_testing.api_server import ApiServer


class Kueue:
    def __init__(self, api: ApiServer, write: Callable[[Manifest], object]) -> None:
        """`write`: changes an object, and tells the operator."""
        self._api, self._write = api, write
        self.label_nodes()

    def label_nodes(self, **labels: str) -> None:
        """Of the flavor `spot`."""
        spec = {"nodeLabels": labels}
        self._api.keep({"kind": "ResourceFlavor", "metadata": {"name": "spot"}, "spec": spec})

    @property
    def raw(self) -> Manifest | None:
        """The Workload as the API server holds it."""
        return next((raw for (kind, _), raw in self._api.stored.items() if kind == "Workload"), None)

    @property
    def workload(self) -> Workload | None:
        return read_workload(self.raw) if self.raw is not None else None

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.raw.get("status") or {})

    def condition(self, kind: str) -> str:
        """`True/Reason`; empty if there is none."""
        found = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), None)
        return f"{found['status']}/{found['reason']}" if found is not None else ""

    def admit(self, at: datetime, counts: Mapping[str, int] | None = None, **status: Any) -> None:
        """Reserve quota of the flavor `spot` and admit; `counts`: pod sets that get fewer pods than asked for."""
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
        kept = [c for c in self.status.get("conditions", ()) if c["type"] not in news]
        said = [
            {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": write_time(at)}
            for kind, (value, reason) in news.items()
        ]
        status = {**self.status, "conditions": [*kept, *said], **status}
        self._write({**self.raw, "status": status})
