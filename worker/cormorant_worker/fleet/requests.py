"""What a fleet asks of its workers beside tickets, and their replies."""

from collections import deque

import structlog

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.worker import messages

log = structlog.get_logger()


class Requests:
    """Asks workers, and keeps their replies until they are taken. Guarded by the fleet's condition."""

    def __init__(self, slots: Slots) -> None:
        self.stuck: deque[WorkerHandle] = deque()
        """Workers that do not read as fast as they are sent; the selector takes them out."""
        self._slots = slots
        self._replies: dict[int, messages.Reply | None] = {}
        """Pending requests: None until the reply comes."""
        self._numbers = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def ask(self, handle: WorkerHandle, command: messages.Command, payload: Payload | None = None) -> int:
        """Ask a worker for something. Returns a number, for `is_answered` and `take`.

        A worker that is dying does not answer: callers see that it is gone.
        """
        number = self.next_number()
        self._replies[number] = None
        size_bytes = payload.size_bytes if payload is not None else 0
        handle.request(messages.Request(number=number, command=command, size_bytes=size_bytes), payload)
        return number

    def reseed(self, handle: WorkerHandle, stream: WorkerPlace) -> int:
        """Have a worker build its environments again, with the seeds of a place. Returns a number as `ask`."""
        number = self.next_number()
        self._replies[number] = None
        handle.stream = stream
        handle.send(messages.Reseed(number=number, place=stream))
        return number

    def ask_all(self, command: messages.Command) -> dict[int, WorkerHandle]:
        """Ask every worker that is ready and collects. Returns who was asked."""
        asked = (handle for handle in self._slots.workers if handle.is_ready and not handle.slot.is_server)
        return {self.ask(handle, command): handle for handle in asked}

    def tell(self, handle: WorkerHandle, command: messages.Command) -> None:
        """Ask a worker, and wait for no reply."""
        del self._replies[self.ask(handle, command)]

    def tell_all(
        self, command: messages.PauseStepping | messages.ResumeStepping | messages.Stop, *, only_ready: bool = True
    ) -> None:
        """Ask every worker, and wait for no reply."""
        for handle in self._slots.workers:
            if handle.is_ready or not only_ready:
                self.tell(handle, command)

    def note_reply(self, handle: WorkerHandle, reply: messages.Reply) -> None:
        handle.unanswered.pop(reply.number, None)
        if reply.number in self._replies:
            self._replies[reply.number] = reply
        elif reply.error:
            log.warning("request_refused", worker=handle.name, reason=reply.error)

    def is_answered(self, number: int) -> bool:
        return self._replies[number] is not None

    def take(self, number: int) -> messages.Reply | None:
        """The reply, if it has come; it is not waited for any more."""
        return self._replies.pop(number, None)
