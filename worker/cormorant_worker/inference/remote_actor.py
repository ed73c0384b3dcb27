"""An actor whose policy acts in another process: it hands rows to an inference server and takes the actions later.

    ask(rows) -> Asked  ...environments of the other EnvGroup step...  Asked.answer() -> Acted, version

When the server is gone, the worker meets the next one and hands the rows in again, with the same random words.
"""

import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cormorant_worker.errors import InferenceUnavailable, PolicyMismatch
from cormorant_worker.inference.handshake import Greeting, Welcome, frame, receive_welcome
from cormorant_worker.inference.mailbox import ANSWER, REQUEST, Mailbox
from cormorant_worker.policy.actor import Acted
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.spaces import Array, Arrays, Leaf
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights

_LOOK_S = 0.5
"""While it waits for the server, a worker looks this often whether it was told to pause or to stop."""
_AGAIN_S = 0.05
_LONGEST_WAIT_S = 900.0
"""For actions, and for a server after one that is gone: longer than the fleet takes to see that a server hangs and to
start another."""


class ServedWeights(StagedWeights):
    """Of a policy that acts elsewhere: nothing is offered here, and the version is that of the newest actions."""

    def __init__(self) -> None:
        super().__init__({})
        self.needed = self.version
        """No older version may act in the batch under way."""

    def wait_until_offered(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Does not wait: the server does, before it acts."""
        self.needed = max(self.needed, version)
        return True

    def acted(self, version: PolicyVersion) -> None:
        """Actions of this version have come."""
        if version > self.version:
            self.version = version
            self.on_applied(version)


class Asked:
    """Rows at the server. Their arrays must not change before they are answered."""

    __slots__ = ("_actor", "arrays", "n", "number", "slot")

    def __init__(self, actor: "RemoteActor", slot: int, number: int, arrays: Sequence[Array], n: int) -> None:
        self._actor = actor
        self.slot = slot
        self.number = number
        self.arrays = arrays
        self.n = n

    def answer(self) -> tuple[Acted, PolicyVersion]:
        """Wait for the actions, and the version that acted. The arrays are valid until this slot's next `ask`.

        Raises:
            InferenceUnavailable: no server answered in 900 s.
            Stopped: the fleet gave the batch up meanwhile.
        """
        return self._actor.answer(self)


class RemoteActor:
    """Used by the thread that steps; `servers` may be replaced by others."""

    def __init__(self, servers: Sequence[bytes | str], greeting: Greeting) -> None:
        """Meet the server, which may have to build the policy first.

        Args:
            servers: addresses of the servers that this worker may use; it uses the first one.
            greeting: what its rows look like.

        Raises:
            InferenceUnavailable: no server answered in 900 s.
            PolicyMismatch: the server's policy does not fit these environments.
        """
        self.servers = tuple(servers)
        self.weights = ServedWeights()
        self.device = torch.device("cpu")
        """Whose generator draws the rows' words."""
        self.while_waiting: Callable[[], None] = _go_on
        """Called twice a second while a server keeps this thread waiting."""
        self.on_waiting: Callable[[bool], None] = _ignore
        """Told when the wait for a server becomes long, and when it is over."""
        self.acted_version = self.weights.version
        """Of the answer that was taken last."""
        self._greeting = greeting
        self._number = 0
        self._asked: dict[int, Asked] = {}
        """Not answered yet, by slot."""
        self._answered: dict[int, PolicyVersion] = {}
        """Answered and not taken yet, by slot."""
        self._free = list(range(greeting.num_slots))
        self._server: bytes | str = b""
        self._incoming = bytearray()
        self._socket: socket.socket | None = None
        self._mailbox: Mailbox
        welcome = self._meet()
        assert welcome.layout is not None
        assert welcome.specs is not None
        self.outputs: tuple[Leaf, ...] = welcome.layout.outputs
        self.states: tuple[Leaf, ...] = welcome.layout.states
        self.initial_states: Arrays = welcome.initial_states
        self.weights.specs = {model: dict(tensors) for model, tensors in welcome.specs.items()}

    def ask(self, obs: Arrays, states: Arrays, is_init: Array) -> Asked:
        """Hand rows in: observations [n, ...] a leaf, states [n, ...], is_init [n] bool. Returns at once."""
        n = len(is_init)
        words = torch.randint(-(2**63), 2**63 - 1, (n,)).numpy().view(np.uint64)
        self._number += 1
        asked = Asked(self, self._free.pop(), self._number, (*obs, *states, is_init.copy(), words), n)
        self._asked[asked.slot] = asked
        if self._server != self.servers[0]:
            self._meet()  # hands in everything that is not answered, these rows as well
        else:
            try:
                self._hand_in(asked)
            except OSError:
                self._meet()
        return asked

    def answer(self, asked: Asked) -> tuple[Acted, PolicyVersion]:
        """See `Asked.answer`."""
        if asked.slot not in self._answered:
            self._await(asked)
        version = self.acted_version = self._answered.pop(asked.slot)
        self._free.append(asked.slot)
        self.weights.acted(version)
        slot, n = self._mailbox.slots[asked.slot], asked.n
        return (
            Acted(
                tuple([a[:n] for a in slot.action]),
                tuple([a[:n] for a in slot.outputs]),
                tuple([a[:n] for a in slot.next_states]),
            ),
            version,
        )

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """`ask` and `answer` at once."""
        return self.ask(obs, states, is_init).answer()[0]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._mailbox.close()

    # -- the connection ------------------------------------------------------------------------------------------

    def _hand_in(self, asked: Asked) -> None:
        slot, n = self._mailbox.slots[asked.slot], asked.n
        for stored, value in zip(slot.request, asked.arrays, strict=True):
            stored[:n] = value
        assert self._socket is not None
        self._socket.sendall(REQUEST.pack(asked.number, self.weights.needed, asked.slot, n))

    def _await(self, asked: Asked) -> None:
        deadline, is_long = time.monotonic() + _LONGEST_WAIT_S, False
        try:
            while asked.slot not in self._answered:
                try:
                    self._receive()
                except TimeoutError:
                    if not is_long:
                        is_long = True
                        self.on_waiting(True)
                    self.while_waiting()
                    if time.monotonic() > deadline:
                        raise _unavailable(f"{asked.n} rows of {self._greeting.name} were not answered") from None
                    if self._server != self.servers[0]:
                        self._meet()
                except OSError:
                    self._meet()
        finally:
            if is_long:
                self.on_waiting(False)

    def _receive(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(4096)
        if not data:
            raise ConnectionResetError("the inference server closed the connection")
        self._incoming += data
        while len(self._incoming) >= ANSWER.size:
            number, version, slot, _ = ANSWER.unpack_from(self._incoming)
            del self._incoming[: ANSWER.size]
            asked = self._asked.get(slot)
            if asked is not None and asked.number == number:
                del self._asked[slot]
                self._answered[slot] = PolicyVersion(version)

    def _meet(self) -> Welcome:
        """Connect to the server that is assigned now, and hand in what is not answered."""
        deadline, is_long = time.monotonic() + _LONGEST_WAIT_S, False
        try:
            while True:
                try:
                    return self._try_to_meet(deadline)
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise _unavailable(f"{self._greeting.name} met no server: {error}") from error
                    if not is_long:
                        is_long = True
                        self.on_waiting(True)
                    self.while_waiting()
                    time.sleep(_AGAIN_S)
        finally:
            if is_long:
                self.on_waiting(False)

    def _try_to_meet(self, deadline: float) -> Welcome:
        # What was answered and not taken lies in the old mailbox: its views stay valid as long as they are held.
        old = self._mailbox if self._socket is not None else None
        address = self.servers[0]
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.settimeout(_LOOK_S)
            try:
                found.connect(address)
            except ConnectionRefusedError:
                self.servers = (*self.servers[1:], address)  # that server is retired
                raise
            found.sendall(frame(self._greeting))
            welcome, descriptor = self._await_welcome(found, address, deadline)
        except BaseException:
            found.close()
            raise
        if welcome.layout is None:
            found.close()
            raise PolicyMismatch(welcome.refusal)
        mailbox = Mailbox(welcome.layout, SharedMemory(descriptor, welcome.layout.size_bytes))
        if old is not None:
            for slot in self._answered:
                for new, kept in zip(mailbox.slots[slot].answer, old.slots[slot].answer, strict=True):
                    new[:] = kept
            self.close()
        self._socket, self._server, self._mailbox = found, address, mailbox
        self._incoming.clear()
        for asked in list(self._asked.values()):
            self._hand_in(asked)
        return welcome

    def _await_welcome(self, found: socket.socket, address: bytes | str, deadline: float) -> tuple[Welcome, int]:
        is_long = False
        try:
            while True:
                try:
                    return receive_welcome(found)
                except TimeoutError:
                    if not is_long:
                        is_long = True
                        self.on_waiting(True)
                    self.while_waiting()
                    if time.monotonic() > deadline or address != self.servers[0]:
                        raise ConnectionResetError("no inference server answered") from None
        finally:
            if is_long:
                self.on_waiting(False)


def _unavailable(what: str) -> InferenceUnavailable:
    return InferenceUnavailable(
        f"{what} within {_LONGEST_WAIT_S:.0f} s; look at the inference servers in `cormorant describe`, and at "
        "their logs"
    )


def _go_on() -> None:
    """Outside a collector there is nothing to look at."""


def _ignore(is_waiting: bool) -> None:
    """Nobody watches."""
