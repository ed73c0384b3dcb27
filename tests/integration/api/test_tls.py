"""TLS: served with a certificate that is valid now, refused with a sentence otherwise."""

import http.client
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cormorant_api.errors import TlsError
from cormorant_api.server import HeadServer
from cormorant_api.settings import Settings
from cormorant_api.tls import check_tls
from cormorant_testing.collecting import make_job

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def make_certificate(folder: Path, *, days: int) -> tuple[Path, Path]:
    """A certificate that signs itself; with days < 0, one that was over before it began."""
    cert, key, request = (folder / f"{name}{days}.pem" for name in ("cert", "key", "request"))
    made = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    openssl(*made.split(), "-keyout", str(key), "-out", str(request))
    signed = f"x509 -req -in {request} -signkey {key} -days {days} -out {cert}"
    openssl(*signed.split())
    return cert, key


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def test_a_certificate_that_is_over_is_refused(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, days=-1)
    with pytest.raises(TlsError, match=r"cert-1\.pem has expired; renew it"):
        check_tls(cert, key)
    with pytest.raises(TlsError, match="has expired"):
        HeadServer(make_job(), Settings(port=0, directory=tmp_path / "head", tls_cert=cert, tls_key=key))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path, days=2)
    _, key = make_certificate(tmp_path, days=3)
    with pytest.raises(TlsError, match="cannot use"):
        check_tls(cert, key)
    with pytest.raises(TlsError, match="cannot use"):
        check_tls(cert, tmp_path / "nowhere.pem")


def test_requests_are_served_over_tls_and_before_there_is_a_fleet(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, days=2)
    with HeadServer(make_job(), Settings(port=0, directory=tmp_path / "head", tls_cert=cert, tls_key=key)) as server:
        scheme, _, port = server.url.rpartition(":")
        context = ssl.create_default_context(cafile=str(cert))
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        connection = http.client.HTTPSConnection("127.0.0.1", int(port), context=context, timeout=30)
        answers = []
        for path in ("/livez", "/healthz", "/startupz", "/readyz"):
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            answers.append(response.status)
        connection.close()
    assert (scheme, answers) == ("https://127.0.0.1", [200, 200, 503, 503])
