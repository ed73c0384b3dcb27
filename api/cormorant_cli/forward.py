"""A port of this machine that leads to a port of a pod, as `kubectl port-forward` makes it, without kubectl.

    client ──TCP──> 127.0.0.1:free ──a thread a direction──> web socket of the API server ──> kubelet ──> pod:port

Each connection is one web socket: the pod's end is the client's end.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cormorant_cli.cluster import Stream
from cormorant_cli.errors import CliError

_CHUNK = 256 * 1024
_JOIN_S = 2.0
_THEIR_THREADS = "Kubernetes port forward proxy"


class Forwarder:
    """Listens until it is closed. `error` says why the last connection could not be made."""

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        """Listen on a free port. `open_stream`: makes one connection to the pod; called in a thread for each that is
        accepted here.
        """
        self._open = open_stream
        self.error = ""
        self._lock = threading.Lock()
        """Guards `_open_ends`."""
        self._open_ends: set[Stream | socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="port-forward", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and every connection. May be called twice."""
        # A close alone does not wake a thread in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            ends, self._open_ends = self._open_ends, set()
        for end in ends:
            _end(end)
        self._thread.join(_JOIN_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="port-forward-in", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream = self._open()
        except CliError as error:
            self.error = str(error)
            connection.close()
            return
        with self._lock:
            self._open_ends |= {connection, stream}
        back = threading.Thread(target=_copy, args=(stream, connection), name="port-forward-out", daemon=True)
        back.start()
        _copy(connection, stream)
        back.join()
        with self._lock:
            self._open_ends -= {connection, stream}
        connection.close()
        stream.close()


@contextmanager
def forwarded(open_stream: Callable[[], Stream]) -> Iterator[Forwarder]:
    """A port of this machine that leads to what `open_stream` connects to. A command opens one at a time."""
    before = threading.excepthook

    def handle(given: threading.ExceptHookArgs) -> None:
        # Threads of the Kubernetes client: a connection that broke is the business of whoever asks over it.
        if given.thread is None or not given.thread.name.startswith(_THEIR_THREADS):
            before(given)

    forwarder = Forwarder(open_stream)
    threading.excepthook = handle
    try:
        yield forwarder
    finally:
        forwarder.close()
        threading.excepthook = before


def _copy(source: Stream | socket.socket, sink: Stream | socket.socket) -> None:
    """Until one of the two ends; then both do."""
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    _end(sink)
    _end(source)


def _end(stream: Stream | socket.socket) -> None:
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
