"""Every head of a namespace, played by one small server: what an operator asks is answered, what it orders is kept."""

import json
from dataclasses import dataclass, field

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
        if head.accepted not in ("", token):
            return Say(401)
        if path == "v1/desired":
            body = json.loads(heard.body)
            head.sizes |= body.get("groups", {})
            head.empty_slots = body.get("empty_slots", {})
            head.paused = body["paused"] if body.get("paused") is not None else head.paused
        elif path == "v1/drain":
            head.phase = "Draining"
        desired = {"groups": head.sizes, "paused": head.paused, "pending": False, "empty_slots": head.empty_slots}
        status = job_status(
            job=job, phase=head.phase, pause_state="paused" if head.paused else "running", desired=desired
        )
        counted = {"collected": head.frames, "settled": head.frames, "stepped": head.frames, "per_second": 10.0}
        status["frames"] |= counted
        status["queue"]["capacity"] = 16
        drained = {"draining": True, "waiting_batches": 0, "lent_batches": 0, "ended": False}
        document = {"v1/desired": desired, "v1/drain": drained}.get(path, status)
        return Say(body=json.dumps(document).encode())
