"""The operator's client against a real head: tokens that were derived, answers that are read, orders that are taken."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cormorant_api.__main__ import listen_host
from cormorant_contract.rest.control import Desired
from cormorant_operator.errors import HeadSilent
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Job
from cormorant_operator.job_state import HeadAnswer
from cormorant_operator.pods import Pod
from cormorant_operator.render.children import derive, secret
from cormorant_operator.templates import Templates
from cormorant_testing.collecting import make_job
from cormorant_testing.operator_world import make_job as operator_job
from cormorant_testing.serving import Served, serve

KEY = b"k" * 32
NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEAD = Pod(name="toy-head-1", uid="h1", role="head", created=NOW, epoch=1, ip="127.0.0.1")


Call = Callable[[HeadClient], Coroutine[Any, Any, Any]]


class Talk:
    """An operator's job, and its real head."""

    def __init__(self, served: Served, job: Job) -> None:
        self.job, self.port = job, served.server.url.rpartition(":")[2]

    def __call__(self, call: Call, *, key: bytes = KEY, port: str = "") -> Any:
        async def talk() -> Any:
            client = HeadClient(key=key, url=f"http://{{ip}}:{port or self.port}")
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(talk())

    def ask(self, **where: Any) -> HeadAnswer:
        answer = self(lambda client: client.ask(self.job, HEAD), **where)
        assert isinstance(answer, HeadAnswer)
        return answer

    async def until(self, client: HeadClient, is_so: Callable[[HeadAnswer], bool]) -> HeadAnswer:
        async with asyncio.timeout(60):
            while True:
                answer = await client.ask(self.job, HEAD)
                if is_so(answer):
                    return answer
                await asyncio.sleep(0.1)


@pytest.fixture
def talk(tmp_path: Path) -> Any:
    manifest = make_job(num_envs=2, lengths=4)
    templates = Templates(manifest.spec)
    job = Job(name=manifest.metadata.name, namespace="default", uid="u1", templates=templates, status=manifest.status)
    token_file = tmp_path / "tokens.json"
    token_file.write_text(secret(job, derive(KEY, uid="u1"))["stringData"]["tokens.json"])
    token_file.chmod(0o440)
    with serve(manifest, directory=tmp_path / "head", workers=1, token_file=token_file) as served:
        yield Talk(served, job)


def test_operator_and_head_understand_each_other(talk: Talk) -> None:
    answer = talk.ask()
    assert (answer.pod_uid, answer.sizes, answer.is_spec_paused) == ("h1", {"cpu": 1}, False)

    async def scale_pause_and_drain(client: HeadClient) -> None:
        await client.set_desired(talk.job, HEAD, Desired(groups={"cpu": 2}, empty_slots={"cpu": (0,)}, paused=True))
        told = await talk.until(client, lambda a: not a.is_resizing and a.pause_state == "paused")
        assert (told.sizes, told.empty_slots, told.is_spec_paused) == ({"cpu": 2}, {"cpu": (0,)}, True)
        await client.set_desired(talk.job, HEAD, Desired(groups={"cpu": 2}, empty_slots={}, paused=False))
        assert (await talk.until(client, lambda a: not a.is_spec_paused)).empty_slots == {}
        await talk.until(client, lambda a: a.frames > 0)
        # Nobody takes batches: the workers come to wait for a learner, which is no stall.
        await talk.until(client, lambda a: a.is_queue_full)
        await client.drain(talk.job, HEAD)
        await talk.until(client, lambda a: a.phase == "Draining")

    talk(scale_pause_and_drain)


def test_answer_that_comes_in_pieces_is_read_whole(talk: Talk) -> None:
    """A head behind a network that cuts its answers after a few bytes."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(talk.port))
        back.write((await reader.readuntil(b"\r\n\r\n")).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        while part := await there.read(200):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        for end in (writer, back):
            end.close()
            await end.wait_closed()
        done.set()

    done = asyncio.Event()

    async def ask() -> HeadAnswer:
        async with asyncio.timeout(60), await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            client = HeadClient(key=KEY, url=f"http://{{ip}}:{server.sockets[0].getsockname()[1]}")
            try:
                return await client.ask(talk.job, HEAD)
            finally:
                await client.close()
                await done.wait()

    assert asyncio.run(ask()).sizes == {"cpu": 1}


def test_unreachable_head_or_other_key_is_silence(talk: Talk) -> None:
    with pytest.raises(HeadSilent, match="toy-head-1 answered GET /v1/status with 401"):
        talk.ask(key=b"x" * 32)
    with pytest.raises(HeadSilent, match="toy-head-1 did not answer GET /v1/status"):
        talk.ask(port="1")
    other = replace(talk.job, uid="u2")
    with pytest.raises(HeadSilent, match="401"):
        talk(lambda client: client.ask(other, HEAD))


def test_connection_to_a_head_is_kept_for_the_next_question() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")

    async def talk() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HeadClient(key=KEY, url=f"http://{{ip}}:{server.sockets[0].getsockname()[1]}")
        manifest = make_job(num_envs=2, lengths=4)
        templates = Templates(manifest.spec)
        job = Job(name="toy", namespace="a", uid="u", templates=templates, status=manifest.status)
        for _ in range(3):
            with pytest.raises(HeadSilent, match="503"):
                await client.ask(job, HEAD)
        await client.close()
        server.close()

    asyncio.run(talk())
    assert connections == 1


def test_head_with_an_ipv6_address_is_asked() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy")
        await writer.drain()
        writer.close()

    async def ask() -> None:
        async with asyncio.timeout(60), await asyncio.start_server(answer, "::1", 0) as server:
            client = HeadClient(key=KEY, url=f"http://{{ip}}:{server.sockets[0].getsockname()[1]}")
            try:
                with pytest.raises(HeadSilent, match="with 503: busy"):
                    await client.ask(operator_job(), replace(HEAD, ip="::1"))
            finally:
                await client.close()

    asyncio.run(ask())
    assert b"Host: [::1]:" in asked[0]


@pytest.mark.parametrize(
    ("host", "pod_ip", "listened_on"),
    [
        ("0.0.0.0", "fd00::1", "::"),
        ("0.0.0.0", "10.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "", "0.0.0.0"),
        ("127.0.0.1", "fd00::1", "127.0.0.1"),
    ],
)
def test_head_listens_on_the_addresses_of_its_pods_family(host: str, pod_ip: str, listened_on: str) -> None:
    assert listen_host(host, pod_ip=pod_ip) == listened_on
