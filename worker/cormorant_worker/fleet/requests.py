"""What a fleet asks of its workers beside tickets, and their replies. Guarded by the fleet's condition."""

from itertools import islice
from typing import Any

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.scheduler import Slot
from cormorant_worker.fleet.transport import Engine
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.worker.messages import Reply, Request, Reseed

_SHOWN = 8
"""Of the workers, in a message."""


class Requests:
    """Asks members, and keeps what they answer until somebody takes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.members: dict[Slot, WorkerHandle] = {}
        self.requests: dict[int, Reply | None] = {}
        """Requests under way, and their replies once they came."""
        self._numbers = 0

    def serving(self) -> list[WorkerHandle]:
        return [member for member in self.members.values() if member.is_ready and not member.is_leaving]

    def describe(self) -> str:
        """Who does what, for messages: a few of them."""
        shown = sorted(islice(self.members.items(), _SHOWN))
        found = [f"{m.name} is {m.link.describe_doing()}" for _, m in shown]
        if (more := len(self.members) - len(found)) > 0:
            found.append(f"and {more:,} more")
        return ", ".join(found) or "there are no workers"

    def request(self, member: WorkerHandle, action: str, *, state: bytes = b"", **details: Any) -> int:
        """Ask a worker for something; the reply will be in `requests` under the number that is returned."""
        number = self._next_number()
        self.requests[number] = None
        payload = self.engine.share(state) if state else None
        # A worker that is dying hears nothing and answers nothing: whoever waits sees that it is no member any more.
        asked = Request(number=number, action=action, size_bytes=len(state), **details)
        member.request(asked, payload)
        if payload is not None:
            payload.close()
        return number

    def begin_anew(self, member: WorkerHandle, stream: WorkerPlace) -> int:
        """Have a worker begin anew from the seeds of a place. Returns the number of the reply."""
        number = self._next_number()
        self.requests[number] = None
        member.stream = stream
        member.send(Reseed(number=number, place=stream))
        return number

    def open_gates(self) -> None:
        """Let every worker go on."""
        for member in self.members.values():
            if member.is_ready:
                self._tell(member, "resume")

    def shut_gates(self) -> None:
        """Make every worker stop at its next vector step, without waiting for it."""
        for member in self.members.values():
            if member.is_ready:
                self._tell(member, "pause")

    def stop_stepping(self) -> None:
        """Make every worker give its batch up and finish."""
        for member in self.members.values():
            self._tell(member, "stop")

    def _tell(self, member: WorkerHandle, action: str) -> None:
        self.requests.pop(self.request(member, action), None)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
