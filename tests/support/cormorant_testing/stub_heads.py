"""Every head of a namespace, played by one small server: what an operator asks is answered, what it orders is kept."""

import json
from dataclasses import dataclass, field
from typing import Any

from cormorant_testing.scripted_head import Heard, Say, ScriptedHead, job_status


@dataclass
class StubHead:
    """What one head says, and was told."""

    frames: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: {"cpu": 1})
    empty_slots: dict[str, list[int]] = field(default_factory=dict)
    paused: bool = False
    phase: str = "Running"
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that were sent."""
    accepted: str = ""
    """The Authorization header that is accepted; empty: any."""


class StubHeads(ScriptedHead):
    """Use as a context manager; `url` goes into the operator's --head-url."""

    def __init__(self) -> None:
        self.by_job: dict[str, StubHead] = {}
        super().__init__(self._answer)

    @property
    def url(self) -> str:
        return f"{super().url}/{{job}}"

    def _answer(self, heard: Heard) -> Say:
        job, _, path = heard.path.lstrip("/").partition("/")
        head = self.by_job.setdefault(job, StubHead())
        token = heard.headers.get("authorization", "")
        head.tokens.add(token)
        document = _respond(head, job, heard.method, f"/{path}", json.loads(heard.body or b"{}"))
        if head.accepted not in ("", token):
            return Say(401)
        return Say(body=json.dumps(document).encode())


def _respond(head: StubHead, job: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/desired":
        head.sizes = {**head.sizes, **body.get("groups", {})}
        head.empty_slots = body.get("empty_slots", {})
        head.paused = body["paused"] if body.get("paused") is not None else head.paused
    desired = {"groups": head.sizes, "paused": head.paused, "pending": False, "empty_slots": head.empty_slots}
    if path == "/v1/desired":
        return desired
    if path == "/v1/drain":
        head.phase = "Draining"
        return {"draining": True, "waiting_batches": 0, "lent_batches": 0, "ended": False}
    pause_state = "paused" if head.paused else "running"
    status = job_status(job=job, phase=head.phase, pause_state=pause_state, desired=desired)
    status["frames"] |= {"collected": head.frames, "settled": head.frames, "stepped": head.frames, "per_second": 10.0}
    status["queue"]["capacity"] = 16
    return status
