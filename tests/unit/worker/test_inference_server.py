"""One inference server and its workers, in threads, on both ways: batches, versions, padding, and workers that go."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from cormorant_testing.scripts import until
from cormorant_worker.errors import PolicyMismatch
from cormorant_worker.inference.address import AssignedServers
from cormorant_worker.inference.connections import (
    HEADER,
    Greeting,
    Header,
    ListeningSocket,
    ServerConnection,
    listen,
    read_frames,
    send_frame,
)
from cormorant_worker.inference.remote_actor import Asked, RemoteActor
from cormorant_worker.inference.server import Gathering, InferenceServer, ServedPolicy, make_shapes
from cormorant_worker.policy.actor import PolicyActor, wrap_policy
from cormorant_worker.spaces import Space
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights
from cormorant_worker.wire import MessageSocket

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = gymnasium.spaces.Discrete(1000)
TEN = {"policy": {"weight": torch.tensor(10.0)}}
AT_ONCE_OR_ALL = Gathering()


class Summing(torch.nn.Module):
    """Acts the sum of a row, plus its weight; notes the size of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.sizes: list[int] = []

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        self.sizes.append(len(observation))
        return {"action": (observation.sum(-1) + self.weight).long(), "twice": observation * 2}


class Running:
    """A server that turns in a thread until it is told to stop; another one may listen in its place then."""

    def __init__(self, listener: ListeningSocket, how: Gathering) -> None:
        self.listener, self.policy = listener, Summing()
        models = wrap_policy(self.policy, "test")

        def build(observation: Space, action: Space, rows: int) -> ServedPolicy:
            actor = PolicyActor(models, observation, action, device=torch.device("cpu"), num_rows=rows)
            self.policy.sizes.clear()
            self.weights = StagedWeights(models.modules)
            return ServedPolicy(actor=actor, weights=self.weights, observation_space=OBS, action_space=ACTION)

        self.server = InferenceServer(replace(listener, socket=listener.socket.dup()), build, how)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.server.turn(nullcontext)

    def pause(self) -> None:
        """It turns no more."""
        self._is_over.set()
        self._thread.join(10)

    def stop(self) -> None:
        """May be called twice."""
        self.pause()
        self.server.close()


class Scene(ExitStack):
    """One way between servers and workers. What is started on it is stopped with it."""

    host = ""
    """Where servers listen; empty: for workers of this machine."""

    def server(self, how: Gathering = AT_ONCE_OR_ALL, *, after: Running | None = None) -> Running:
        listener = after.listener if after else listen(self.host)
        self.callback(listener.socket.close)
        server = Running(listener, how)
        self.callback(server.stop)
        return server

    def worker(self, *servers: Running, slots: int = 1, obs: Space = OBS) -> RemoteActor:
        addresses = AssignedServers([server.listener.address for server in servers])
        actor = RemoteActor(addresses, greeting(slots, obs))
        self.callback(actor.close)
        return actor


@pytest.fixture(params=["", "127.0.0.1"], ids=["one-machine", "nodes"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with Scene() as scene:
        scene.host = request.param
        yield scene


between_nodes = pytest.mark.parametrize("scene", ["127.0.0.1"], indirect=True, ids=["nodes"])


def greeting(slots: int = 1, obs: Space = OBS) -> Greeting:
    return Greeting(name="w-0-0", observation_space=obs, action_space=ACTION, rows=4, num_slots=slots)


def ask(actor: RemoteActor, *values: float) -> Asked:
    """As many rows, whose sums are these."""
    rows = np.array([[value, 0, 0] for value in values], np.float32)
    return actor.ask((rows,), (), np.ones(len(values), np.bool_))


def sums(asked: Asked) -> list[int]:
    """What was acted, once the server has answered."""
    found: list[int] = asked.answer()[0].actions[0].tolist()
    return found


def test_rows_come_back_in_order_with_outputs_and_version(scene: Scene) -> None:
    server = scene.server()
    actor = scene.worker(server)
    acted, version = ask(actor, 1, 2, 3).answer()
    assert acted.actions[0].tolist() == [1, 2, 3]
    assert acted.outputs[0][:, 0].tolist() == [2, 4, 6]
    assert version == 0
    assert [leaf.key for leaf in actor.outputs] == [("twice",)]
    assert actor.weights.specs == server.weights.specs


def test_rows_of_all_workers_are_acted_on_at_once(scene: Scene) -> None:
    server = scene.server(Gathering(max_wait_s=20.0))
    actors = [scene.worker(server) for _ in range(3)]
    asked = [ask(actor, i, i + 1) for i, actor in enumerate(actors)]
    assert [sums(a) for a in asked] == [[0, 1], [1, 2], [2, 3]]
    assert server.policy.sizes == [6]


def test_all_that_a_worker_asked_is_acted_on_at_once(scene: Scene) -> None:
    server = scene.server(Gathering(max_wait_s=0.0))
    _, actor = scene.worker(server), scene.worker(server, slots=3)
    server.pause()
    asked = [ask(actor, i) for i in range(2)]
    server.server.turn(nullcontext)
    assert server.policy.sizes == [2]
    assert [sums(one) for one in reversed(asked)] == [[1], [0]]


def test_batches_are_no_larger_than_max_rows_and_padded_to_shapes(scene: Scene) -> None:
    server = scene.server(Gathering(max_rows=4, max_wait_s=0.3, shapes=(1, 4)))
    asked = [ask(scene.worker(server), 5, 6, 7) for _ in range(2)]
    for one in asked:
        assert sums(one) == [5, 6, 7]
    assert server.policy.sizes == [4, 4]
    server.stop()
    assert (server.server.served.rows, server.server.served.padded_rows) == (6, 2)


def test_rows_wait_for_the_version_that_their_ticket_names(scene: Scene) -> None:
    server = scene.server()
    actor = scene.worker(server)
    actor.weights.wait_until_offered(PolicyVersion(1), 0.0)
    asked = ask(actor, 1)
    until(lambda: bool(server.server._waiting))
    assert server.policy.sizes == []
    server.weights.offer(TEN, version=PolicyVersion(1))
    acted, version = asked.answer()
    assert (acted.actions[0].tolist(), version, actor.weights.version) == ([11], 1, 1)


def test_next_server_does_not_act_with_older_weights(scene: Scene) -> None:
    ahead, behind = scene.server(), scene.server()
    actor = scene.worker(ahead, behind)
    ahead.weights.offer(TEN, version=PolicyVersion(7))
    assert ask(actor, 1).answer()[1] == 7
    ahead.stop()
    ahead.listener.socket.close()

    def offer() -> None:
        until(lambda: bool(behind.server._waiting))
        behind.weights.offer(TEN, version=PolicyVersion(7))

    offering = threading.Thread(target=offer)
    offering.start()
    acted, version = ask(actor, 1).answer()
    offering.join(10)
    assert (acted.actions[0].tolist(), version) == ([11], 7)


def test_worker_that_is_gone_holds_nobody_up(scene: Scene) -> None:
    server = scene.server(Gathering(max_wait_s=20.0))
    gone, other = scene.worker(server), scene.worker(server)
    ask(gone, 9)
    until(lambda: len(server.server._waiting) == 1)
    gone.close()
    until(lambda: not server.server._waiting)
    assert sums(ask(other, 1)) == [1]
    assert server.policy.sizes == [1]


def test_rows_are_asked_again_at_the_next_server(scene: Scene) -> None:
    first = scene.server(Gathering(max_wait_s=60.0))
    # With the other one, a batch would not be complete.
    actor, _ = scene.worker(first, slots=2), scene.worker(first)
    waits: list[bool] = []
    actor.on_waiting = waits.append
    asked = [ask(actor, 1, 2), ask(actor, 3)]
    first.stop()
    assert first.policy.sizes == []
    scene.server(Gathering(max_wait_s=0.0), after=first)
    assert [sums(one) for one in asked] == [[1, 2], [3]]
    assert waits in ([], [True, False])


def test_worker_with_other_spaces_is_refused(scene: Scene) -> None:
    server = scene.server()
    scene.worker(server)
    with pytest.raises(PolicyMismatch, match="environments must not differ between workers"):
        scene.worker(server, obs=gymnasium.spaces.Box(0, 1, (2,), np.float32))


def test_shapes_on_a_device_are_powers_of_two() -> None:
    assert make_shapes(100) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert make_shapes(1) == (1,)
    assert Gathering(shapes=(4, 16)).padded(5) == 16
    assert Gathering(shapes=(4, 16)).padded(17) == 17


@between_nodes
def test_worker_of_another_node_must_know_the_key(scene: Scene) -> None:
    server = scene.server()
    connection = ServerConnection(replace(server.listener.address, key=b"guessed"), greeting())
    with pytest.raises(OSError, match=r"closed the connection|Connection reset"):
        connection.read_welcome()
    connection.close()
    assert server.server.policy is None
    # The server goes on with those who know it.
    assert sums(ask(scene.worker(server), 4)) == [4]


def test_rows_larger_than_the_sockets_buffers_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    asked = np.arange(8 << 20, dtype=np.float32).reshape(8, -1)
    stored = np.zeros_like(asked)
    messages, frames = MessageSocket(ours), read_frames(theirs, lambda header: [stored[: header.n]])
    header = Header(number=7, version=3, slot=1, n=8)
    send_frame(messages, header, [asked])
    assert messages.has_unsent
    while (found := next(frames)) is None:
        messages.flush()
    assert not messages.has_unsent
    assert found == header
    assert np.array_equal(stored, asked)
    ours.close()
    with pytest.raises(ConnectionResetError):
        next(frames)
    theirs.close()


def test_rows_for_a_slot_that_does_not_exist_end_the_connection(scene: Scene) -> None:
    server = scene.server()
    connection = scene.worker(server)._connection
    assert connection is not None
    connection.messages.socket.sendall(HEADER.pack(1, 0, 5, 1))
    until(lambda: not server.server._clients)


# On one machine the kernel tells that a process has ended.
@between_nodes
def test_connections_between_nodes_end_when_a_node_is_lost(scene: Scene) -> None:
    server = scene.server()
    connection = scene.worker(server)._connection
    assert connection is not None
    (client,) = server.server._clients
    for end in (connection.messages.socket, client.messages.socket):
        options = [getattr(socket, f"TCP_{name}") for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")]
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [end.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [5, 5, 3, 20_000]
