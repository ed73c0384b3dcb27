"""The operator's client against a real head: tokens, answers, orders, and certificates that others verify, too. And
kopf's streams against a server that breaks them: what may have been missed is reported.
"""

import asyncio
import base64
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cormorant_api.__main__ import listen_host
from cormorant_cli.connection import client_errors, connect_to_job
from cormorant_cli.errors import BadInput
from cormorant_contract.job import GROUP, VERSION
from cormorant_contract.rest.control import Desired
from cormorant_contract.schema import PLURAL
from cormorant_contract.workers import Autoscale
from cormorant_operator.errors import HeadSilent, SettingsError
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Job, Templates
from cormorant_operator.job_state import HeadAnswer
from cormorant_operator.kube.watch import Watch
from cormorant_operator.pods import Pod
from cormorant_operator.render.children import secret, token
from cormorant_testing.api_proxy import write_kubeconfig
from cormorant_testing.certificates import make_certificate, needs_openssl
from cormorant_testing.collecting import make_job
from cormorant_testing.operator_world import make_job as make_operator_job
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead
from cormorant_testing.serving import serve

pytestmark = pytest.mark.anyio
KEY = b"k" * 32
HEAD = Pod(name="toy-head-1", uid="h1", role="head", created=datetime(2026, 1, 1, tzinfo=UTC), epoch=1, ip="127.0.0.1")
TLS_HEAD = replace(HEAD, is_tls=True)
ISSUER = {"certManager": {"issuerRef": {"name": "ca"}}}


@asynccontextmanager
async def client_of(port: object, *, key: bytes = KEY, ca_file: Path | None = None) -> AsyncIterator[HeadClient]:
    client = HeadClient(key=key, url=f"{{scheme}}://{{ip}}:{port}", ca_file=ca_file)
    try:
        yield client
    finally:
        await client.close()


async def ask(job: Job, port: object, *, head: Pod = HEAD, **client_options: Any) -> HeadAnswer:
    async with client_of(port, **client_options) as client:
        return await client.ask(job, head)


def submitted(folder: Path) -> tuple[Any, Job, Path]:
    """A manifest, the operator's job of it, and the token file of its head."""
    manifest = make_job(num_envs=2, lengths=4)
    templates = Templates(manifest.spec)
    job = Job(name=manifest.metadata.name, namespace="default", uid="u1", templates=templates, status=manifest.status)
    token_file = folder / "tokens.json"
    token_file.write_text(secret(job, KEY)["stringData"]["tokens.json"])
    token_file.chmod(0o440)
    return manifest, job, token_file


async def test_operator_and_head_understand_each_other(tmp_path: Path) -> None:
    manifest, job, token_file = submitted(tmp_path)
    groups = tuple(
        group.model_copy(update={"autoscale": Autoscale(max_replicas=4)}) for group in job.spec.worker_groups
    )
    autoscaled = replace(job, templates=Templates(job.spec.model_copy(update={"worker_groups": groups})))

    async def until(is_so: Callable[[HeadAnswer], bool], job: Job = job) -> HeadAnswer:
        async with asyncio.timeout(60):
            while not is_so(answer := await client.ask(job, HEAD)):
                await asyncio.sleep(0.1)
            return answer

    with serve(manifest, directory=tmp_path / "head", workers=1, token_file=token_file) as head:
        port = head.server.url.rpartition(":")[2]
        for stranger, key in ((job, b"x" * 32), (replace(job, uid="u2"), KEY)):
            with pytest.raises(HeadSilent, match="toy-head-1 answered GET /v1/status with 401"):
                await ask(stranger, port, key=key)
        async with client_of(port) as client:
            answer = await client.ask(job, HEAD)
            assert (answer.pod_uid, answer.sizes, answer.is_spec_paused, answer.troubles) == (
                "h1",
                {"cpu": 1},
                False,
                {},
            )
            await client.set_desired(job, HEAD, Desired(groups={"cpu": 2}, empty_slots={"cpu": (0,)}, paused=True))
            told = await until(lambda a: not a.is_resizing and a.pause_state == "paused")
            assert (told.sizes, told.empty_slots, told.is_spec_paused) == ({"cpu": 2}, {"cpu": (0,)}, True)
            await client.set_desired(job, HEAD, Desired(groups={"cpu": 2}, empty_slots={}, paused=False))
            assert (await until(lambda a: not a.is_spec_paused)).empty_slots == {}
            await until(lambda a: a.frames > 0)
            # Nobody takes batches: the workers come to wait for a learner, which is no stall.
            await until(lambda a: a.is_queue_full)
            waits = (await until(lambda a: a.waits is not None and a.waits.idle_s["cpu"] > 0, autoscaled)).waits
            assert (waits.sizes, waits.worker_s["cpu"] > waits.idle_s["cpu"]) == ({"cpu": 2}, True)
            assert (waits.consumer_s, (await client.ask(job, HEAD)).waits) == (0.0, None)
            await client.drain(job, HEAD)
            await until(lambda a: a.phase == "Draining")
    with pytest.raises(HeadSilent, match="toy-head-1 did not answer GET /v1/status"):
        await ask(job, port)


@pytest.mark.parametrize(("ip", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_head_is_asked_on_one_connection_whatever_its_address(ip: str, host: str) -> None:
    heard: list[list[bytes]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append([])
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while True:
                heard[-1].append(await reader.readuntil(b"\r\n\r\n"))
                for part in (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nb", b"us", b"y"):  # a network cuts it
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.02)

    async with (
        asyncio.timeout(60),
        await asyncio.start_server(answer, ip, 0) as server,
        client_of(server.sockets[0].getsockname()[1]) as client,
    ):
        for _ in range(3):
            with pytest.raises(HeadSilent, match=r"with 503: busy$"):
                await client.ask(make_operator_job(), replace(HEAD, ip=ip))
    ((first, _, _),) = heard
    assert f"Host: {host}:".encode() in first


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


@needs_openssl
async def test_operator_and_command_line_verify_the_head(tmp_path: Path) -> None:
    manifest, job, token_file = submitted(tmp_path)
    read_token = token(KEY, uid="u1", role="read")
    ours, stranger = make_certificate(tmp_path, "ours"), make_certificate(tmp_path, "stranger")
    host = f"{job.name}-api.default.svc"
    cert, key = make_certificate(tmp_path, host=f"DNS:{host}", by=ours)
    with serve(manifest, directory=tmp_path / "head", token_file=token_file, tls_cert=cert, tls_key=key) as served:
        port = int(served.server.url.rpartition(":")[2])
        assert (await ask(job, port, head=TLS_HEAD, ca_file=ours[0])).sizes == {"cpu": 1}
        for untrusted in (stranger[0], None):
            with pytest.raises(HeadSilent, match=r"toy-head-1 did not answer .*certificate verify failed"):
                await ask(job, port, head=TLS_HEAD, ca_file=untrusted)
        with connect_to_job(cluster_of(job.name, port, ours[0]), job.name, "write", token=read_token) as client:
            assert client.status().job == job.name
        with (
            pytest.raises(BadInput, match=r"the certificate of .* was rejected"),
            client_errors(),
            connect_to_job(cluster_of(job.name, port, stranger[0]), job.name, "write", token=read_token) as client,
        ):
            client.status()
        # Renewed, as cert-manager does it, while the head runs.
        before = shown_by(port)
        make_certificate(tmp_path, host=f"DNS:{host}", by=ours)
        shown_by(port)
        assert shown_by(port) == ssl.PEM_cert_to_DER_cert(cert.read_text()[cert.read_text().index("-----BEGIN") :])
        assert shown_by(port) != before
        assert (await ask(job, port, head=TLS_HEAD, ca_file=ours[0])).sizes == {"cpu": 1}


def shown_by(port: int) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=30))


async def test_unreadable_certificates_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read certificates of --head-ca-file .*nowhere\.crt"):
        HeadClient(key=KEY, ca_file=tmp_path / "nowhere.crt")


def cluster_of(job: str, port: int, ca: Path) -> Any:
    """A cluster with a job whose head listens here."""
    ca_data = base64.b64encode(ca.read_bytes()).decode()
    metadata = {"name": job, "namespace": "default", "uid": "u1"}
    found = {
        job: {"metadata": metadata, "spec": {"head": {"tls": ISSUER}}},
        f"{job}-tls": {"data": {"ca.crt": ca_data}},
    }
    cluster = Mock(namespace="default")
    cluster.get.side_effect = lambda _kind, name, **_: found[name]
    cluster.objects.return_value = [{"metadata": {"name": "head", "labels": {}}, "status": {"phase": "Running"}}]
    cluster.options_of.return_value = ""
    cluster.open_port.side_effect = lambda *_, **__: socket.create_connection(("127.0.0.1", port))
    return cluster


# -- streams ---------------------------------------------------------------------------------------------------

JOBS = {(GROUP, VERSION, PLURAL): "CollectorJob"}
JOB = {"metadata": {"name": "pong", "namespace": "a", "uid": "u", "resourceVersion": "7"}}


def resource(plural: str, kind: str, *, namespaced: bool) -> dict[str, Any]:
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": ["list", "watch"]}


DISCOVERY = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [resource("namespaces", "Namespace", namespaced=False)]},
    "/apis": {
        "groups": [{"name": GROUP, "versions": [{"version": VERSION}], "preferredVersion": {"version": VERSION}}]
    },
    f"/apis/{GROUP}/{VERSION}": {"resources": [resource(PLURAL, "CollectorJob", namespaced=True)]},
}
EXPIRED = {"kind": "Status", "reason": "Expired", "code": 410}


def said(document: Any, status: int = 200) -> Say:
    return Say(status, json.dumps(document).encode() + b"\n", {"Content-Type": "application/json"})


@pytest.mark.parametrize("end", [said({"type": "ERROR", "object": EXPIRED}), said(EXPIRED, 410)])
def test_a_version_that_is_too_old_is_a_gap(end: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, is_over = [end], threading.Event()
    lists, gaps = threading.Semaphore(0), threading.Semaphore(0)

    def answer(heard: Heard) -> Say:
        if heard.path in DISCOVERY:
            return said(DISCOVERY[heard.path])
        if "watch=" not in heard.path:
            lists.release()
            return said({"metadata": {"resourceVersion": "7"}, "items": [JOB]})
        if not ends:  # later streams stay open
            is_over.wait(60)
        return ends.pop() if ends else said({})

    with ScriptedHead(answer) as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server.url)))
        watch = Watch(lambda *_, **__: None, kinds=JOBS, on_gap=gaps.release)
        watch.start()
        try:
            for _ in range(2):
                assert lists.acquire(timeout=60), "kopf goes on without its stream"
            assert gaps.acquire(timeout=60)
        finally:
            is_over.set()
            watch.stop()
