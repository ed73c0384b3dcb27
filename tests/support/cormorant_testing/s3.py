"""An S3 server in a process of its own, and a network in front of it that is slow or gone.

moto's server keeps objects in memory. CORMORANT_S3, a command line, starts one that keeps them on disk instead, for
example VersityGW: see CONTRIBUTING.md.
"""

import asyncio
import os
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from cormorant_testing.scripts import Server, unused_port

VARIABLE = "CORMORANT_S3"
"""`{port}`, `{folder}` and `{key}`, which is both the access key and its secret, are filled in."""
BUCKET = "cormorant"
KEY = "cormorant-key"
_LINGER_S = 30.0
_MOTO = f"{sys.executable} -m moto.server --host 127.0.0.1 --port {{port}}"


class S3Server:
    """Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.port, self.keeps_objects = unused_port(), bool(os.environ.get(VARIABLE))
        template = os.environ.get(VARIABLE) or _MOTO
        self._command = shlex.split(template.format(port=self.port, folder=folder, key=KEY))
        self._server = self._start()

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What clients are told. `port`: of a network in front of the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _start(self) -> Server:
        return Server(self._command, f"http://127.0.0.1:{self.port}/")

    def freeze(self) -> None:
        self._server.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._server.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self._server.kill()
        self._server.close()
        self._server = self._start()

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()


class Network:
    """Passes connections on to a port. What a client has sent arrives although the client dies. A context manager."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        """Of everything that clients send."""
        self.is_cut = False
        """New connections are closed at once, and nothing passes on old ones."""
        self.held = b"no such request"
        """Bodies of requests whose headers have these bytes wait for `released`."""
        self.num_held = 0
        self.released = threading.Event()
        self._target = target
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Network":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._stop.set()
        self._thread.join(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await asyncio.to_thread(self._stop.wait)
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        with suppress(asyncio.CancelledError):  # at the end
            await asyncio.gather(self._pass_on(reader, to_server, slowly=True), self._pass_on(from_server, writer))

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slowly: bool = False
    ) -> None:
        is_expected = False
        try:
            with suppress(OSError):
                while (data := await reader.read(1 << 16)) and not self.is_cut:
                    if slowly:
                        await asyncio.sleep(self.delay_s)
                        # Some clients send the body when the server has said that it wants it.
                        is_held, is_expected = is_expected or self.held in data, False
                        if is_held and b"100-continue" in data:
                            is_expected = True
                        elif is_held:
                            self.num_held += 1
                            await asyncio.to_thread(self.released.wait)
                    writer.write(data)
                    await writer.drain()
            # Some servers drop the request of a client that hangs up; one that lost its power does not.
            if slowly and not self.is_cut:
                await asyncio.sleep(_LINGER_S)
        finally:
            writer.close()
