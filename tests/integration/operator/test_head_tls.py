"""A real head over TLS: the operator and the command line verify it, and refuse a stranger's certificate."""

import asyncio
import base64
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cormorant_cli.connection import client_errors
from cormorant_cli.errors import BadInput
from cormorant_cli.job_head import connect_to_head
from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.errors import CertificateRefused, SettingsError
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Job
from cormorant_operator.job_state import HeadAnswer
from cormorant_operator.pods import Pod
from cormorant_operator.render.children import derive, secret
from cormorant_operator.render.pods import PodOrigin, head_pod
from cormorant_operator.templates import Templates
from cormorant_testing.collecting import make_job
from cormorant_testing.helm import Manifest, find, render
from cormorant_testing.operator_world import make_job as make_operator_job
from cormorant_testing.prometheus import Prometheus
from cormorant_testing.serving import serve

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
KEY = b"k" * 32
ISSUER = {"certManager": {"issuerRef": {"name": "ca"}}}
HEAD = Pod(
    name="toy-head-1",
    uid="h1",
    role="head",
    created=datetime(2026, 1, 1, tzinfo=UTC),
    epoch=1,
    ip="127.0.0.1",
    is_tls=True,
)


class Authority:
    """Signs certificates of heads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cert, self._key, self._folder = folder / f"{name}.crt", folder / f"{name}.key", folder
        made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -days 2"
        openssl(*made.split(), "-keyout", str(self._key), "-out", str(self.cert))

    def sign(self, host: str) -> tuple[Path, Path]:
        cert, key, request, names = (self._folder / f"tls.{end}" for end in ("crt", "key", "csr", "names"))
        names.write_text(f"subjectAltName = DNS:{host}\n")
        made = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=head"
        openssl(*made.split(), "-keyout", str(key), "-out", str(request))
        by = f"-CA {self.cert} -CAkey {self._key} -CAcreateserial -days 2 -extfile {names}"
        openssl(*f"x509 -req -in {request} -out {cert} {by}".split())
        return cert, key


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def ask(job: Job, port: str, ca_file: Path | None) -> HeadAnswer:
    async def talk() -> HeadAnswer:
        client = HeadClient(key=KEY, url=f"{{scheme}}://{{ip}}:{port}", ca_file=ca_file)
        try:
            return await client.ask(job, HEAD)
        finally:
            await client.close()

    return asyncio.run(talk())


def test_operator_and_command_line_verify_the_head(tmp_path: Path) -> None:
    manifest = make_job(num_envs=2, lengths=4)
    name = manifest.metadata.name
    job = Job(
        name=name,
        namespace="default",
        uid="u1",
        templates=Templates(manifest.spec),
        status=manifest.status,
    )
    tokens = derive(KEY, uid="u1")
    token_file = tmp_path / "tokens.json"
    token_file.write_text(secret(job, tokens)["stringData"]["tokens.json"])
    token_file.chmod(0o440)
    ours, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "stranger")
    host = f"{name}-api.default.svc"
    cert, key = ours.sign(host)
    with serve(manifest, directory=tmp_path / "head", token_file=token_file, tls_cert=cert, tls_key=key) as served:
        url = served.server.url
        port = url.rpartition(":")[2]
        assert ask(job, port, ours.cert).sizes == {"cpu": 1}
        for untrusted in (stranger.cert, None):
            with pytest.raises(CertificateRefused, match=f"does not trust the certificate of toy-head-1: .*{host}"):
                ask(job, port, untrusted)
        cluster: Any = JobCluster(name, int(port), ours.cert.read_text())
        with connect_to_head(cluster, cluster.job, token=tokens.read) as client:
            assert client.status().job == name
        strange: Any = JobCluster(name, int(port), stranger.cert.read_text())
        with (
            pytest.raises(BadInput, match=r"the certificate of .* was rejected"),
            client_errors(),
            connect_to_head(strange, strange.job, token=tokens.read) as client,
        ):
            client.status()
        # Renewed, as cert-manager does it, while the head runs.
        before = shown_by(int(port))
        ours.sign(host)
        shown_by(int(port))
        assert shown_by(int(port)) == ssl.PEM_cert_to_DER_cert(cert.read_text()[cert.read_text().index("-----BEGIN") :])
        assert shown_by(int(port)) != before
        assert ask(job, port, ours.cert).sizes == {"cpu": 1}


def shown_by(port: int) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=30))


POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"


def scrape_config(name: str, monitor: Manifest, ca_file: Path, *, proxy: str) -> dict[str, Any]:
    """The endpoint `api` of a PodMonitor, as the Prometheus operator writes it for Prometheus."""
    endpoint = next(found for found in monitor["spec"]["podMetricsEndpoints"] if found["port"] == "api")
    is_verified = "ca" in endpoint["tlsConfig"]

    def snake(key: str) -> str:
        return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key)

    pod = head_pod(
        make_operator_job(head={"tls": {"secretName": "mine"}}),
        OperatorDefaults(),
        PodOrigin(template="t", base_image="i"),
        epoch=1,
        floor_frames=0,
        config="c",
    )["metadata"]
    meta = {"__meta_kubernetes_namespace": pod["namespace"], "__meta_kubernetes_pod_name": pod["name"]}
    for kind in ("annotation", "label"):
        for key, value in pod[f"{kind}s"].items():
            meta[f"__meta_kubernetes_pod_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}"] = str(value)
    return {
        "job_name": name,
        "static_configs": [{"targets": ["10.0.0.1:8000"], "labels": meta}],
        "metrics_path": endpoint["path"],
        "proxy_url": proxy,
        "tls_config": {"ca_file": str(ca_file)} if is_verified else {"insecure_skip_verify": True},
        "relabel_configs": [{snake(key): value for key, value in rule.items()} for rule in endpoint["relabelings"]],
    }


@contextmanager
def network(port: int) -> Iterator[tuple[str, set[str]]]:
    """A proxy that has every address lead to a port of this machine. Gives its URL, and the addresses asked for."""
    asked: set[str] = set()

    def pass_on(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as head:
            request = client.recv(1 << 16)
            while b"\r\n\r\n" not in request:
                request += client.recv(1 << 16)
            asked.add(request.split()[1].decode())
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            ends = {client: head, head: client}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    if not (part := end.recv(1 << 16)):
                        return
                    ends[end].sendall(part)

    def serve_all() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=pass_on, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_all, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prometheus_scrapes_a_head_with_tls_as_the_pod_monitor_says(tmp_path: Path) -> None:
    ours, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "stranger")
    cert, key = ours.sign("pong-api.team-a.svc")
    bundled, bare = (
        find(render(*values, apis=(POD_MONITOR,)), "PodMonitor", "cormorant-jobs")
        for values in (("jobs.tls.caBundle=PEM",), ())
    )
    manifest = make_job(num_envs=2, lengths=4)
    with (
        serve(manifest, directory=tmp_path / "head", tls_cert=cert, tls_key=key) as served,
        network(int(served.server.url.rpartition(":")[2])) as (proxy, asked),
    ):
        configs = [
            scrape_config("bundle", bundled, ours.cert, proxy=proxy),
            scrape_config("stranger", bundled, stranger.cert, proxy=proxy),
            scrape_config("no-bundle", bare, ours.cert, proxy=proxy),
        ]
        with Prometheus(tmp_path / "prometheus", configs) as db:
            for name in ("bundle", "no-bundle"):
                db.wait_for_numbers(f'cormorant_frames_total{{job="{name}", instance="10.0.0.1:8000"}}')
            assert db.wait_for_numbers('up{job="stranger"}') == [0.0]
        assert asked == {"pong-api.team-a.svc:8000", "10.0.0.1:8000"}


def test_unreadable_certificates_are_refused_at_start(tmp_path: Path) -> None:
    async def make() -> None:
        HeadClient(key=KEY, ca_file=tmp_path / "nowhere.crt")

    with pytest.raises(SettingsError, match=r"cannot read certificates of --head-ca-file .*nowhere\.crt"):
        asyncio.run(make())


class JobCluster:
    """A cluster with the job `name`, whose head listens here."""

    def __init__(self, name: str, port: int, ca: str) -> None:
        self.job = {"metadata": {"name": name, "namespace": "default", "uid": "u1"}, "spec": {"head": {"tls": ISSUER}}}
        self._port, self._secrets = port, {f"{name}-tls": {"ca.crt": base64.b64encode(ca.encode()).decode()}}

    def objects(self, _kind: str, **_: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "head", "labels": {}}, "status": {"phase": "Running"}}]

    def get(self, _kind: str, name: str, *, namespace: str) -> dict[str, Any]:
        assert namespace == "default"
        return {"data": self._secrets[name]}

    def options_of(self, _job: object) -> str:
        return ""

    def open_port(self, pod: str, _port: int, *, namespace: str, timeout_s: float) -> socket.socket:
        assert (pod, namespace) == ("head", "default")
        return socket.create_connection(("127.0.0.1", self._port))
