"""`examples/rest_ppo_cartpole.py`, unchanged, through everything that can happen to its head without a cluster."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from cormorant_client import Client, connect
from cormorant_testing.heads import START_S, HeadProcess
from cormorant_testing.scripts import until, unused_port

EXAMPLES = Path(__file__).parents[3] / "examples"
TOTAL = 24_000
READY_S = 330
"""A head gives up when no worker has started after 300 s; until then a busy machine may be slow."""
ENOUGH = 2560
"""Frames after which a learner has gone on."""


class PortForward:
    """127.0.0.2 as `kubectl port-forward` has it: connections to its ports go to the same ports of 127.0.0.1."""

    def __init__(self, *ports: int) -> None:
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.listen()

    def listen(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def drop(self) -> None:
        """Refuse connections, and cut those that are open."""
        asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(10)

    async def _listen(self) -> None:
        for port in self._ports:

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
                await self._pass_on(reader, writer, port)

            self._servers.append(await asyncio.start_server(accept, "127.0.0.2", port))

    async def _drop(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        with suppress(OSError):
            try:
                there, here = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.close()
                return
            self._writers |= {writer, here}
            try:
                await asyncio.gather(_pump(reader, here), _pump(there, writer))
            finally:
                self._writers -= {writer, here}
                here.close()
                writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        sink.write_eof()


def goes_on(client: Client, learner: subprocess.Popen[str], head: HeadProcess) -> int:
    """Wait until the learner has acknowledged some more batches. Returns the frames so far."""
    head.wait_for("head_ready", seconds=READY_S)
    first = client.status().frames.settled

    def has_gone_on() -> bool:
        assert learner.poll() is None, learner.communicate()
        assert head.process.poll() is None, head.text
        return client.status().frames.settled >= first + ENOUGH

    until(has_gone_on, seconds=2 * START_S)
    return client.status().frames.settled


@pytest.mark.slow
@pytest.mark.timeout(12 * START_S)
def test_the_cartpole_learner_survives_what_befalls_its_head(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "cartpole-ppo.yaml").read_text())
    job["spec"]["collection"]["totalFrames"] = TOTAL
    manifest, folder, tokens = tmp_path / "job.yaml", tmp_path / "head", tmp_path / "tokens.json"
    manifest.write_text(yaml.safe_dump(job))
    port, data_port = unused_port(), unused_port()
    where = (
        "--port", str(port), "--data-port", str(data_port), "--token-file", str(tokens), "--workers", "2",
        "--drain-seconds", "20",
    )  # fmt: skip
    forward = PortForward(port, data_port)
    with HeadProcess(manifest, folder, *where) as head:
        head.wait_for("head_ready", seconds=READY_S)
        url = f"http://127.0.0.2:{port}"
        learner = subprocess.Popen(
            [sys.executable, EXAMPLES / "rest_ppo_cartpole.py", "--url", url, "--token-file", tokens],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with learner, connect(f"http://127.0.0.1:{port}", token_file=tokens) as client:
            try:
                goes_on(client, learner, head)
                workers = [one for child in psutil.Process(head.process.pid).children() for one in child.children()]
                workers[0].kill()
                goes_on(client, learner, head)
                forward.drop()
                time.sleep(2)
                assert learner.poll() is None
                forward.listen()
                goes_on(client, learner, head)
                head.kill()
                with HeadProcess(manifest, folder, *where) as after_kill:
                    goes_on(client, learner, after_kill)
                    assert after_kill.end(signal.SIGTERM) == 128 + signal.SIGTERM
                with HeadProcess(manifest, folder, *where) as after_drain:
                    frames = goes_on(client, learner, after_drain)
                    after_drain.kill()
                elsewhere = ("--epoch", "4", "--floor-frames", str(frames))
                with HeadProcess(manifest, tmp_path / "another", *where, *elsewhere):
                    out, log = learner.communicate(timeout=4 * START_S)
            finally:
                learner.kill()
                forward.drop()
    assert learner.returncode in (0, 1), log
    assert learner.returncode == 0 or re.search(r"the return is [\d.]+ at the end of the stream", log), log
    assert int(out.splitlines()[-1].split()[0]) > TOTAL // 2
