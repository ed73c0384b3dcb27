"""An inference server: gathers ready rows, calls the policy once, scatters the actions. One thread, one policy.

    select ──> accept, Greeting -> Welcome
           ──> requests of workers ──> waiting ──(enough, or long enough)──> act ──> answers

The policy is called once every slot of every worker waits, the batch has `max_rows`, or its oldest row has waited long
enough. Weights change between two calls.

# N rows of a batch
"""

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import numpy as np
import structlog

from cormorant_worker.inference import connections
from cormorant_worker.inference.address import Served
from cormorant_worker.policy.actor import Actor
from cormorant_worker.spaces import Array, Arrays, Space, describe, leaves
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights
from cormorant_worker.wire import ArrayCursor, SharedMemory

log = structlog.get_logger()

_READ = selectors.EVENT_READ
_TURN_S = 0.25
"""At least so often a server without rows shows that it lives."""
_SHARE_OF_ACT = 0.25
"""Share of an act's duration that the oldest row may wait for others, where `maxWaitMs` is unset."""
_LONGEST_S = 0.02
_NEWEST = 0.1
"""Weight of the newest act in the mean duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Rules for completing and padding a batch."""

    max_rows: int = 0
    """0: no limit."""
    max_wait_s: float = -1.0
    """Negative: a quarter of a policy call."""
    shapes: tuple[int, ...] = ()
    """Batch sizes to which batches are padded, ascending; empty: no padding."""

    def padded(self, rows: int) -> int:
        """Padded batch size; only the first `rows` rows are real."""
        return next((shape for shape in self.shapes if shape >= rows), rows)


@dataclass(frozen=True, slots=True)
class _Waiting:
    client: connections.ConnectedWorker
    slot: connections.MailboxSlot
    header: connections.Header
    since_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    actor: Actor
    weights: StagedWeights
    observation_space: Space
    action_space: Space


class InferenceServer:
    """Owned by the thread that calls `turn`."""

    def __init__(
        self,
        listener: connections.ListeningSocket,
        build: Callable[[Space, Space, int], ServedPolicy],
        how: Gathering,
    ) -> None:
        """Begin to listen. `build`: makes the policy, from the spaces of the first worker and its number of rows."""
        self.policy: ServedPolicy | None = None
        """Built for the first worker, unless it is set before."""
        self.served = Served()
        self._build, self._how = build, how
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.socket.setblocking(False)
        self._selector.register(listener.socket, _READ, listener)
        self._clients: set[connections.ConnectedWorker] = set()
        self._waiting: deque[_Waiting] = deque()
        self._num_slots = 0
        """Requests that can wait at once."""
        self._act_s = 0.0
        """Mean duration of an act."""

    def watch(self, source: object) -> None:
        """Also end turns when this descriptor is readable."""
        self._selector.register(source, _READ, source)  # type: ignore[arg-type]  # has a fileno

    def turn(self, acting: Callable[[], AbstractContextManager[None]]) -> bool:
        """Wait briefly for rows, and act when it is time. Returns whether a watched descriptor is readable."""
        is_told = False
        for key, events in self._selector.select(min(_TURN_S, max(0.0, self._due_s()))):
            if isinstance(key.data, connections.ConnectedWorker):
                self._serve(key.data, events)
            elif key.data is self._listener:
                self._accept()
            else:
                is_told = True
        if self._waiting and self._due_s() <= 0:
            with acting():
                self._act()
        return is_told

    def close(self) -> None:
        """May be called twice."""
        for client in tuple(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.socket.close()

    # -- workers -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        key = self._listener.address.key
        with suppress(OSError):  # it has gone again
            peer, _ = self._listener.socket.accept()
            # Process, user and group of the other end: abstract addresses have no permissions.
            owner = b"" if key else peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if owner and struct.unpack("=iII", owner)[1] != os.getuid():
                log.warning("stranger_refused", reason="a process of another user connected; it was not answered")
                peer.close()
                return
            client = connections.ConnectedWorker(peer, key)
            self._clients.add(client)
            self._selector.register(client.messages.socket, _READ, client)

    def _serve(self, client: connections.ConnectedWorker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.messages.flush()
                self._watch_unsent(client)
            if not events & _READ:
                return
            if client.slots:
                # All that it asked until now is acted on at once: a request a slot.
                for _ in client.slots:
                    if (header := client.read_request()) is None:
                        break
                    self._waiting.append(_Waiting(client, client.slots[header.slot], header, time.monotonic_ns()))
                return
            greeting = client.read_greeting()
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(client, str(error))
            return
        self._meet(client, greeting)

    def _watch_unsent(self, client: connections.ConnectedWorker) -> None:
        # What a worker does not read at once is sent when it reads more.
        events = _READ | selectors.EVENT_WRITE if client.messages.has_unsent else _READ
        if self._selector.get_key(client.messages.socket).events != events:
            self._selector.modify(client.messages.socket, events, client)

    def _meet(self, client: connections.ConnectedWorker, greeting: connections.Greeting) -> None:
        if self.policy is None:
            self.policy = self._build(greeting.observation_space, greeting.action_space, greeting.rows)
        policy = self.policy
        ours, theirs = (
            f"{describe(end.observation_space)} and {describe(end.action_space)}" for end in (policy, greeting)
        )
        if ours != theirs:
            refusal = (
                f"the inference server's policy has the spaces {ours}, {greeting.name} has {theirs}; environments must "
                "not differ between workers"
            )
            with suppress(OSError):  # it is gone, too
                client.messages.send(connections.Welcome(refusal=refusal))
            self._drop(client)
            return
        actor = policy.actor
        layout = connections.MailboxLayout(
            rows=greeting.rows,
            num_slots=greeting.num_slots,
            observation=leaves(policy.observation_space, ("observation",)),
            action=leaves(policy.action_space, ("action",)),
            outputs=actor.outputs,
            states=actor.states,
        )
        memory = SharedMemory.create(layout.size_bytes)
        client.open(layout.slots(ArrayCursor(memory.buffer)), lambda slot: slot.request)
        self._num_slots += len(client.slots)
        welcome = connections.Welcome(layout=layout, initial_states=actor.initial_states, specs=policy.weights.specs)
        with suppress(OSError):  # its end shows at the next turn
            # Each node has a mailbox of its own.
            client.messages.send(welcome, *([] if client.key else [memory.descriptor]))
            self._watch_unsent(client)
        memory.close()

    def _drop(self, client: connections.ConnectedWorker, reason: str = "") -> None:
        if not client.is_known:
            log.warning("stranger_refused", reason=reason)
        self._clients.discard(client)
        self._selector.unregister(client.messages.socket)
        client.messages.close()
        self._num_slots -= len(client.slots)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.client is not client)

    # -- acting --------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        """Seconds until the rows that wait are acted on, as far as is known now."""
        if not self._waiting:
            return _TURN_S
        assert self.policy is not None
        weights, needed = self.policy.weights, max(waiting.header.version for waiting in self._waiting)
        if weights.version < needed and not weights.wait_until_offered(PolicyVersion(needed), 0.0):
            return 0.001  # no older weights act; the rows' workers bound the wait
        max_rows, max_wait_s = self._how.max_rows, self._how.max_wait_s
        # Nothing more can come, or nothing more has room.
        if len(self._waiting) >= self._num_slots or (
            max_rows and sum(waiting.header.n for waiting in self._waiting) >= max_rows
        ):
            return 0.0
        waited_s = (time.monotonic_ns() - self._waiting[0].since_ns) / 1e9
        return (max_wait_s if max_wait_s >= 0 else min(_LONGEST_S, self._act_s * _SHARE_OF_ACT)) - waited_s

    def _act(self) -> None:
        assert self.policy is not None
        # The oldest requests that fit into one act, and at least one.
        taken = [self._waiting.popleft()]
        rows = taken[0].header.n
        while self._waiting and not (self._how.max_rows and rows + self._waiting[0].header.n > self._how.max_rows):
            rows += self._waiting[0].header.n
            taken.append(self._waiting.popleft())
        began_ns = time.monotonic_ns()
        version = self.policy.weights.apply()
        padded = self._how.padded(rows)
        acted = self.policy.actor.act(*self._gather(taken, padded, len(self.policy.actor.states)))
        values = (*acted.actions, *acted.outputs, *acted.states)
        at = 0
        for waiting in taken:
            client, n = waiting.client, waiting.header.n
            for stored, value in zip(waiting.slot.answer, values, strict=True):
                stored[:n] = value[at : at + n]
            at += n
            with suppress(OSError):  # that the worker is gone shows at the next turn
                client.answer(waiting.header._replace(version=version))
                if client.messages.has_unsent:
                    self._watch_unsent(client)
        act_s = (time.monotonic_ns() - began_ns) / 1e9
        self._act_s += _NEWEST * (act_s - self._act_s) if self._act_s else act_s
        served = self.served
        served.rows += rows
        served.padded_rows += padded - rows
        served.acts += 1
        served.requests += len(taken)
        served.wait_s += sum(began_ns - waiting.since_ns for waiting in taken) / 1e9
        served.act_s += act_s

    def _gather(self, taken: Sequence[_Waiting], padded: int, num_states: int) -> tuple[Arrays, Arrays, Array]:
        requests = ([a[: waiting.header.n] for a in waiting.slot.request] for waiting in taken)
        arrays = [np.concatenate(parts) for parts in zip(*requests, strict=True)]
        if missing := padded - len(arrays[-1]):
            # Rows that the policy can act on; its answers are not read.
            arrays = [np.concatenate([a, a[:1].repeat(missing, 0)]) for a in arrays]
        num_obs = len(arrays) - 1 - num_states
        return tuple(arrays[:num_obs]), tuple(arrays[num_obs:-1]), arrays[-1]


def make_shapes(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to a number of rows: the default batch shapes on a device."""
    return tuple(1 << power for power in range((max_rows - 1).bit_length() + 1))
