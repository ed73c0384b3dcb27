"""An actor whose policy runs in another process: it sends rows to an inference server and receives the actions later.

    ask(rows) -> Asked  ...environments of the other EnvGroup step...  Asked.answer() -> Acted, version

When the server is gone, the worker connects to the next one and sends the rows again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cormorant_worker.errors import PolicyError, PolicyMismatch
from cormorant_worker.inference.address import AssignedServers, ServerAddress
from cormorant_worker.inference.connections import Greeting, Header, ServerConnection, Welcome
from cormorant_worker.policy.actor import Acted
from cormorant_worker.spaces import Array, Arrays, Leaf
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights

_AGAIN_S = 0.05
_LONGEST_WAIT_S = 900.0
"""For actions, and for a server after one that is gone: longer than the fleet takes to see that a server hangs and to
start another."""


class ServedWeights(StagedWeights):
    """Weights of a policy on a server: nothing is offered here; the version is that of the latest actions."""

    def __init__(self) -> None:
        super().__init__({})
        self.needed = self.version
        """No older version may act from now on."""

    def wait_until_offered(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Returns at once: the server waits before it computes actions."""
        self.needed = max(self.needed, version)
        return True

    def acted(self, version: PolicyVersion) -> None:
        """Record the version of received actions: no server may use an older one afterwards."""
        self.needed = max(self.needed, version)
        if version > self.version:
            self.version = version
            self.on_applied(version)


@dataclass(slots=True, eq=False)
class Asked:
    """Rows sent to the server. Their arrays must not change before `answer` returns."""

    _actor: "RemoteActor"
    slot: int
    number: int
    arrays: Sequence[Array]
    n: int
    version: PolicyVersion | None = None
    """Version that computed the actions; None: not answered yet."""

    def answer(self) -> tuple[Acted, PolicyVersion]:
        """Wait for the actions and their version. The arrays are valid until this slot's next `ask`. Raises PolicyError
        where no server answered in 900 s, Stopped where the fleet abandoned the batch.
        """
        return self._actor.answer(self)


class RemoteActor:
    """Used by the thread that steps."""

    def __init__(self, servers: AssignedServers, greeting: Greeting) -> None:
        """Meet the server, which may have to build the policy first. Raises PolicyError or PolicyMismatch."""
        self._servers = servers
        self.weights = ServedWeights()
        self.device = torch.device("cpu")
        """Device of the returned arrays."""
        self.while_waiting: Callable[[], None] = lambda: None
        """Called twice a second while a server keeps this thread waiting."""
        self.on_waiting: Callable[[bool], None] = lambda _: None
        """Told when the wait for a server becomes long, and when it is over."""
        self._greeting = greeting
        self._number = 0
        self._asked: dict[int, Asked] = {}
        """Not taken yet, by slot."""
        self._address: ServerAddress | None = None
        self._connection: ServerConnection | None = None
        self._is_long = False
        """The wait under way was reported."""
        welcome = self._meet()
        self._end_wait()
        assert welcome.layout is not None
        assert welcome.specs is not None
        self.outputs: tuple[Leaf, ...] = welcome.layout.outputs
        self.states: tuple[Leaf, ...] = welcome.layout.states
        self.initial_states: Arrays = welcome.initial_states
        self.weights.specs = {model: dict(tensors) for model, tensors in welcome.specs.items()}

    def ask(self, obs: Arrays, states: Arrays, is_init: Array) -> Asked:
        """Send rows: observations [n, ...] per leaf, states [n, ...], is_init [n] bool. Returns at once."""
        n = len(is_init)
        self._number += 1
        slot = next(slot for slot in range(self._greeting.num_slots) if slot not in self._asked)
        asked = Asked(self, slot, self._number, (*obs, *states, is_init.copy()), n)
        self._asked[asked.slot] = asked
        if self._address != self._servers.current:
            self._meet()  # hands in everything that is not taken, these rows as well
        else:
            try:
                self._hand_in(asked)
            except OSError:
                self._meet()
        self._end_wait()
        return asked

    def answer(self, asked: Asked) -> tuple[Acted, PolicyVersion]:
        """See `Asked.answer`. A server that dies or is replaced is not waited for; the fleet ends those that hang."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while asked.version is None:
            assert self._connection is not None
            try:
                header = self._connection.receive()
                request = None if header is None else self._asked.get(header.slot)
                if header is not None and request is not None and request.number == header.number:
                    request.version = PolicyVersion(header.version)
            except TimeoutError:
                self._wait()
                if time.monotonic() > deadline:
                    raise _unavailable(f"{asked.n} rows of {self._greeting.name} were not answered") from None
                if self._address != self._servers.current:
                    self._meet()
            except OSError:
                self._meet()
        version = asked.version
        self._end_wait()
        del self._asked[asked.slot]
        self.weights.acted(version)
        assert self._connection is not None
        slot, n = self._connection.slots[asked.slot], asked.n
        action, outputs, states = (tuple([a[:n] for a in part]) for part in (slot.action, slot.outputs, slot.states))
        return Acted(action, outputs, states), version

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        """`ask` followed by `answer`."""
        return self.ask(obs, states, is_init).answer()[0]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- the connection ------------------------------------------------------------------------------------------

    def _hand_in(self, asked: Asked) -> None:
        assert self._connection is not None
        header = Header(number=asked.number, version=self.weights.needed, slot=asked.slot, n=asked.n)
        self._connection.hand_in(header, asked.arrays)

    def _wait(self) -> None:
        if not self._is_long:
            self._is_long = True
            self.on_waiting(True)
        self.while_waiting()

    def _end_wait(self) -> None:
        if self._is_long:
            self._is_long = False
            self.on_waiting(False)

    def _meet(self) -> Welcome:
        """Connect to the server that is assigned now, and hand in what is not taken."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while True:
            address = self._servers.current
            try:
                return self._try_to_meet(address, deadline)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise _unavailable(f"{self._greeting.name} met no server: {error}") from error
                if isinstance(error, ConnectionRefusedError | TimeoutError) and address == self._servers.current:
                    self._servers.use_next()  # that server is retired, or its node is gone
                self._wait()
                time.sleep(_AGAIN_S)

    def _try_to_meet(self, address: ServerAddress, deadline: float) -> Welcome:
        connection = ServerConnection(address, self._greeting)
        try:
            while True:
                try:
                    welcome = connection.read_welcome()
                    break
                except TimeoutError:
                    self._wait()
                    if time.monotonic() > deadline or address != self._servers.current:
                        raise ConnectionResetError("no inference server answered") from None
        except BaseException:
            connection.close()
            raise
        if welcome.layout is None:
            connection.close()
            raise PolicyMismatch(welcome.refusal)
        self.close()  # what was taken out of its mailbox stays valid as long as it is held
        self._connection, self._address = connection, address
        for asked in self._asked.values():
            asked.version = None  # an answer that was not taken lies in the old mailbox
            self._hand_in(asked)
        return welcome


def _unavailable(what: str) -> PolicyError:
    return PolicyError(
        f"{what} within {_LONGEST_WAIT_S:.0f} s; look at the inference servers in `kubectl describe cjob`, and at "
        "their logs"
    )
