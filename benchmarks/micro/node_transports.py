"""Transports of rows between nodes: one request and its answer over 127.0.0.1, server in a process of its own.

    frames      the one in use: `send_frame` and `read_frames` over TCP
    zeromq      DEALER and ROUTER; once more with CURVE
    grpc        one stream of bytes in both directions
    ray-call    an actor's method
    ray-graph   the same actor in a compiled graph

Not run by `make bench`: `pip install pyzmq grpcio`, then `python -m benchmarks.micro.node_transports [NAME ...]`.
"""

import multiprocessing
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from cormorant_worker.inference.connections import Header, read_frames, send_frame
from cormorant_worker.wire import MessageSocket

PIXELS, FLOATS = np.ones((64, 4, 84, 84), np.uint8), np.ones((1, 4), np.float32)
ACTIONS = np.zeros(64, np.int64)
Ask = Callable[[], object]


def one_server(rows: np.ndarray, pipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer = listener.accept()[0]
    stored = np.empty_like(rows)
    exchange = Exchange(peer, lambda header: [stored])
    while True:
        exchange.receive()
        exchange.send(Header(1, 0, 0, len(ACTIONS)), [ACTIONS])


class Exchange:
    """One end of a connection, as `ServerConnection` and `ConnectedWorker` use theirs."""

    def __init__(self, peer: socket.socket, arrays: Callable) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setblocking(False)
        self._messages, self._frames = MessageSocket(peer), read_frames(peer, arrays)

    def send(self, header: Header, arrays: list) -> None:
        send_frame(self._messages, header, arrays)

    def receive(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._messages, select.POLLIN | (select.POLLOUT if self._messages.has_unsent else 0))
            poll.poll()
            self._messages.flush()
            if next(self._frames) is not None:
                return


@contextmanager
def child(target: Callable, *args: object) -> Iterator[tuple[int, int]]:
    """A process that sends its port. Yields that and its id."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join()


@contextmanager
def frames(rows: np.ndarray) -> Iterator[tuple[Ask, int]]:
    with child(one_server, rows) as (port, pid), socket.create_connection(("127.0.0.1", port)) as peer:
        actions = np.empty_like(ACTIONS)
        exchange = Exchange(peer, lambda header: [actions])

        def ask() -> None:
            exchange.send(Header(1, 0, 0, len(rows)), [rows])
            exchange.receive()

        yield ask, pid


def zeromq_server(rows: np.ndarray, keys: tuple[bytes, bytes] | None, pipe) -> None:
    import zmq

    peer = zmq.Context().socket(zmq.ROUTER)
    if keys:
        peer.curve_server, (peer.curve_publickey, peer.curve_secretkey) = True, keys
    pipe.send(peer.bind_to_random_port("tcp://127.0.0.1"))
    stored = np.empty_like(rows)
    while True:
        name, data = peer.recv_multipart(copy=False)
        stored[:] = np.frombuffer(data, rows.dtype).reshape(rows.shape)
        peer.send_multipart([name, ACTIONS.data], copy=False)


@contextmanager
def zeromq(rows: np.ndarray, *, curve: bool = False) -> Iterator[tuple[Ask, int]]:
    import zmq

    keys = zmq.curve_keypair() if curve else None
    with child(zeromq_server, rows, keys) as (port, pid):
        peer = zmq.Context.instance().socket(zmq.DEALER)
        if keys:
            peer.curve_serverkey, (peer.curve_publickey, peer.curve_secretkey) = keys[0], zmq.curve_keypair()
        peer.connect(f"tcp://127.0.0.1:{port}")

        def ask() -> None:
            peer.send(rows.data, copy=False)
            peer.recv(copy=False)

        yield ask, pid
        peer.close(0)


def grpc_server(rows: np.ndarray, pipe) -> None:
    import grpc

    stored = np.empty_like(rows)

    def act(requests: Iterator[bytes], _: object) -> Iterator[bytes]:
        for data in requests:
            stored[:] = np.frombuffer(data, rows.dtype).reshape(rows.shape)
            yield ACTIONS.tobytes()

    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.method_handlers_generic_handler("Server", {"Act": grpc.stream_stream_rpc_method_handler(act)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    server.wait_for_termination()


@contextmanager
def over_grpc(rows: np.ndarray) -> Iterator[tuple[Ask, int]]:
    import grpc

    with child(grpc_server, rows) as (port, pid), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked: queue.SimpleQueue = queue.SimpleQueue()
        answers = channel.stream_stream("/Server/Act")(iter(asked.get, None))

        def ask() -> None:
            asked.put(rows.tobytes())
            next(answers)

        yield ask, pid
        asked.put(None)


@contextmanager
def over_ray(rows: np.ndarray, *, graph: bool = False) -> Iterator[tuple[Ask, int]]:
    import os

    import ray
    from ray.dag import InputNode

    class Server:
        def pid(self) -> int:
            return os.getpid()

        def act(self, found: np.ndarray) -> np.ndarray:
            self.stored = found.copy()
            return ACTIONS

    if not ray.is_initialized():
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, num_cpus=0, object_store_memory=200 << 20
        )
    server = ray.remote(Server).options(num_cpus=0).remote()
    pid = ray.get(server.pid.remote())
    if not graph:
        yield (lambda: ray.get(server.act.remote(rows))), pid
        return
    with InputNode() as given:
        compiled = server.act.bind(given).experimental_compile()
    yield (lambda: ray.get(compiled.execute(rows))), pid
    compiled.teardown()


CONTENDERS: dict[str, Callable] = {
    "frames": frames,
    "zeromq": zeromq,
    "zeromq-curve": lambda rows: zeromq(rows, curve=True),
    "grpc": over_grpc,
    "ray-call": over_ray,
    "ray-graph": lambda rows: over_ray(rows, graph=True),
}


def cpu_s(pid: int) -> float:
    """Processor time of another process, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(name: str, what: str, rows: np.ndarray, number: int) -> None:
    with CONTENDERS[name](rows) as (ask, pid):
        for _ in range(number // 5):
            ask()
        ours, theirs, took = time.process_time(), cpu_s(pid), []
        for _ in range(number):
            began = time.perf_counter()
            ask()
            took.append(time.perf_counter() - began)
        ours, theirs = (time.process_time() - ours) / number, (cpu_s(pid) - theirs) / number
    p50, p99 = np.percentile(took, (50, 99))
    print(
        f"{name:12} {what:7} p50 {p50 * 1e6:7.0f} us  p99 {p99 * 1e6:7.0f} us  CPU worker {ours * 1e6:6.0f} us, "
        f"server {theirs * 1e6:6.0f} us",
        flush=True,
    )


if __name__ == "__main__":
    for round_number in range(2):
        for chosen in sys.argv[1:] or CONTENDERS:
            measure(chosen, "pixels", PIXELS, 400)
            measure(chosen, "floats", FLOATS, 3000)
        print(f"round {round_number + 1} of 2; threads {threading.active_count()}", flush=True)
