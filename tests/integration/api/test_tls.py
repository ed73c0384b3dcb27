"""TLS: served with files that fit each other, refused with a sentence otherwise."""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cormorant_api.errors import HeadFault
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_cli.__main__ import run
from cormorant_client import BadAddress, connect
from cormorant_client.transport import Broken, Transport, parse_address
from cormorant_testing.certificates import make_certificate, needs_openssl
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.serving import serve, weights_file

pytestmark = needs_openssl


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path)
    _, key = make_certificate(tmp_path, "other")
    for other in (key, tmp_path / "nowhere.pem"):
        with pytest.raises(HeadFault, match="cannot use"):
            HeadServer(make_job(), HeadSettings(port=0, directory=tmp_path / "head", tls_cert=cert, tls_key=other))


def test_learner_and_command_line_trust_ca_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_certificate(tmp_path)
    # Batches of 1 MB, which no socket takes at once.
    job = make_job(
        num_envs=8, policy="versioned", action="box", lengths=(3, 8), collection={"framesPerBatch": 8 * 2000}
    )  # fmt: skip
    judge = make_checker(8, action="box", gaps=True, acts_by_version=True, lengths=(3, 8))
    with serve(job, directory=tmp_path / "head", tls_cert=cert, tls_key=key) as served:
        with connect(served.server.url, token=served.writer.token, ca_file=cert, reconnect_s=5) as client:
            assert client.publish(weights_file(1), wait=30).state == "applied"
            with client.deliveries(frames=2 * 16_000, memory="never") as batches:
                assert sum(judge.take(batch.tensordict()) for batch in batches) == 2 * 16_000
            assert client.weights().numpy()["number"] == 1
        command = ["status", "--url", served.server.url, "--token", served.writer.token, "--json"]
        assert run(command) == 2
        assert "pass the CA to trust as ca_file (on the command line --ca-file)" in capsys.readouterr().err
        assert run([*command, "--ca-file", str(cert)]) == 0
        assert json.loads(capsys.readouterr().out)["weights"]["version"] == 1
        assert run([*command, "--ca-file", str(tmp_path / "none.pem")]) == 2
        assert "cannot use the certificates in" in capsys.readouterr().err


@contextlib.contextmanager
def answering(cert: Path, key: Path, answer: Callable[[ssl.SSLSocket], object]) -> Iterator[str]:
    """A TLS server that answers one connection; yields its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_one() -> None:
            with contextlib.suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as to:
                answer(to)

        thread = threading.Thread(target=serve_one)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)


def test_a_request_over_tls_that_is_closed_never_reads_ciphertext(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    sent, done = threading.Event(), threading.Event()

    def answer(to: ssl.SSLSocket) -> None:
        to.recv(65536)
        to.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"x" * 60_000)
        sent.set()
        done.wait(30)

    with answering(cert, key, answer) as url:
        transport = Transport(tls=ssl.create_default_context(cafile=str(cert)), timeout_s=30)
        with contextlib.suppress(Broken), transport.open(parse_address(url), "GET", "/") as response:
            assert sent.wait(30)
            transport.close()
            while piece := response.read(1000):
                assert set(piece) == set(b"x")
        done.set()


@pytest.mark.parametrize(
    ("days", "host", "sentence"),
    [
        (-1, "IP:127.0.0.1", "was rejected: .*expired; renew it"),
        (2, "DNS:pong-api.rl.svc", "was rejected: .*'127.0.0.1'; connect to a name .* server_name"),
    ],
)
def test_client_refuses_a_bad_certificate_at_once(tmp_path: Path, days: int, host: str, sentence: str) -> None:
    cert, key = make_certificate(tmp_path, days=days, host=host)
    with (
        answering(cert, key, lambda _: None) as url,
        connect(url, token="x" * 20, ca_file=cert, reconnect_s=600) as client,  # longer than a test may take
        pytest.raises(BadAddress, match=sentence),
    ):
        client.status()
