"""A worker as a Ray actor: a runtime behind calls.

Four kinds of calls, each with its own threads, so that none waits behind another:

    collect   a ticket; its result is the sealed batch and its arrays      2 threads
    tell      Begin, Reseed and Finish
    answer    a control request
    listen    other messages and the heartbeat; returns at once if there are messages

The runtime steps in one thread. Each of the two threads of `collect` has a block of its own: while one copies its
batch into the object store, the runtime fills the other's.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.pause_gate import Stopped
from cormorant_worker.errors import DeviceUnavailable
from cormorant_worker.fleet.connections import Waker
from cormorant_worker.inference.connections import listen
from cormorant_worker.pod_files import PodFile, report_blocked
from cormorant_worker.spaces import Array, writable
from cormorant_worker.weights.cached import CachedWeights, Settled
from cormorant_worker.worker.heartbeat import Heartbeat, Phase
from cormorant_worker.worker.messages import Leaving, Request, Sealed, Start, Ticket
from cormorant_worker.worker.runtime import Runtime, WorkerRuntime, describe_failure, forward_logs
from cormorant_worker.worker.serving import ServerRuntime

GROUPS = {"collect": 2, "tell": 1, "answer": 1, "listen": 1}
"""Threads by concurrency group."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

LISTEN_S = 0.5
"""Seconds that `listen` waits for messages: the heartbeat is sent at least this often."""


def _method(*, concurrency_group: str) -> Callable[[_Function], _Function]:
    decorate: Callable[[_Function], _Function] = ray.method(concurrency_group=concurrency_group)
    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    messages: tuple[object, ...]
    is_from_listen: bool
    frames: int
    phase: Phase
    spent_ns: tuple[int, ...]
    pid: int
    node_id: str


class CallUplink:
    """The runtime's connection to the fleet: calls carry messages, and return the replies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Guards everything here."""
        self._inbox: dict[int, object] = {}
        """Messages by their turn: calls may overtake each other."""
        self._turn = 0
        self._news: list[object] = []
        self._blocks: dict[int, Block] = {}
        """By thread of `collect`."""
        self._collecting: dict[int, tuple[int, Future[tuple[Sealed, dict[str, Array]]]]] = {}
        """Thread and result of the calls under way, by ticket number."""
        self._waker = Waker()
        """Set while the next message is here, for a runtime that waits for other things, too."""

    # -- the runtime's side ------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        with self._changed:
            if isinstance(message, Sealed):
                thread, result = self._collecting.pop(message.number)
                result.set_result((message, self._blocks[thread].used_arrays()))
            else:
                self._news.append(message)
                self._changed.notify_all()

    def recv(self) -> Any:
        """Wait for the fleet's next message, in the order in which they were sent: for as long as the fleet lives."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn in self._inbox)
            message = self._inbox.pop(self._turn)
            self._turn += 1
            if self._turn not in self._inbox:
                self._waker.clear()
            return message

    def fileno(self) -> int:
        return self._waker.fileno()

    def has_message(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._turn in self._inbox, timeout_s)

    def block(self, ticket: Ticket, layout: Layout) -> Block:
        """The block of the call that brought the ticket."""
        with self._changed:
            thread, _ = self._collecting[ticket.number]
            if thread not in self._blocks:
                self._blocks[thread] = Block(layout)
            return self._blocks[thread]

    # -- the calls' side ---------------------------------------------------------------------------------------

    def deliver(self, turn: int, message: object) -> None:
        with self._changed:
            self._inbox[turn] = message
            if self._turn in self._inbox:
                self._waker.wake()
                self._changed.notify_all()

    def collect(self, turn: int, ticket: Ticket) -> tuple[Sealed, dict[str, Array]]:
        result: Future[tuple[Sealed, dict[str, Array]]] = Future()
        with self._changed:
            self._collecting[ticket.number] = threading.get_ident(), result
            self.deliver(turn, ticket)  # the condition's lock is reentrant
        return result.result()  # bounded by the fleet: it kills a worker that makes no progress

    def news(self, timeout_s: float) -> tuple[object, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self._news, timeout_s)
            news, self._news = tuple(self._news), []
            return news


class WorkerActor:
    """The actor. Its constructor returns at once; `listen` reports `Ready` or `Failed`."""

    def __init__(self, start: Start, import_path: Sequence[str]) -> None:
        """Begin to build. Of the fleet's `import_path`, folders that exist here are searched, after this machine's."""
        sys.path.extend(path for path in import_path if path not in sys.path and Path(path).is_dir())
        # Subprocess environments search where this process does.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._uplink = CallUplink()
        self._heartbeat = Heartbeat.create()
        self._kept = CachedWeights(PodFile.KEPT.path)
        self._runtime = self._make_runtime(start)
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._has_said_leaving = False
        threading.Thread(target=self._run, args=(start,), name="runtime", daemon=True).start()

    def _make_runtime(self, start: Start) -> Runtime:
        if not start.place.is_server:
            return WorkerRuntime(self._uplink, self._heartbeat, self._kept)
        return ServerRuntime(self._uplink, self._heartbeat, listen(ray.util.get_node_ip_address()), self._kept)

    def _run(self, start: Start) -> None:
        torch.set_num_threads(1)
        forward_logs(self._uplink)
        try:
            self._runtime.run(start)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001  # the thread's edge: whatever it was, the fleet is told
            if isinstance(error, DeviceUnavailable):
                report_blocked(str(error))
            self._uplink.send(describe_failure(error, acts_as_published=self._runtime.acts_as_published))

    @_method(concurrency_group="collect")
    def collect(self, turn: int, ticket: Ticket) -> tuple[Sealed, dict[str, Array]]:
        """Collect one batch. Returns the seal and the used part of every array together."""
        return self._uplink.collect(turn, ticket)

    @_method(concurrency_group="tell")
    def tell(self, turn: int, message: object, settled: Settled) -> None:
        self._kept.keep_settled(settled)
        self._uplink.deliver(turn, message)

    @_method(concurrency_group="answer")
    def answer(self, request: Request, payload: Sequence[Any]) -> News:
        """Answer a request with at most one reference: as a list, Ray holds up no other call for it."""
        # Only read, but torch warns of every view of memory that it may not write.
        data = writable(ray.get(payload[0])) if payload else np.empty(0, np.uint8)
        # With the heartbeat: a worker that has just become ready is no longer held to the limit of its start.
        return self._report((self._runtime.answer(request, data.data),), is_from_listen=False)

    @_method(concurrency_group="listen")
    def listen(self, settled: Settled) -> News:
        """Wait for messages. `settled`: number of settled frames, which this pod reports to the next head."""
        self._kept.keep_settled(settled)
        messages = self._uplink.news(LISTEN_S)
        if not self._has_said_leaving and (leave := PodFile.LEAVE.path) is not None and leave.exists():
            self._has_said_leaving = True
            messages = (*messages, Leaving())
        return self._report(messages, is_from_listen=True)

    def _report(self, messages: tuple[object, ...], *, is_from_listen: bool) -> News:
        return News(
            messages=messages,
            is_from_listen=is_from_listen,
            frames=int(self._heartbeat.frames[0]),
            phase=self._heartbeat.phase,
            spent_ns=self._heartbeat.spent_ns,
            pid=os.getpid(),
            node_id=self._node_id,
        )
