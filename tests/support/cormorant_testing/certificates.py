"""Certificates, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def make_certificate(
    folder: Path, name: str = "tls", *, host: str = "IP:127.0.0.1", days: int = 2, by: tuple[Path, Path] | None = None
) -> tuple[Path, Path]:
    """A certificate and its key, signed by itself or `by` another one; with days < 0, one that is over."""
    cert, key, request, names = (folder / f"{name}.{end}" for end in ("crt", "key", "csr", "names"))
    names.write_text(f"subjectAltName = {host}\n" + ("" if by else "basicConstraints = critical, CA:TRUE\n"))
    signer = f"-CA {by[0]} -CAkey {by[1]} -CAcreateserial" if by else f"-signkey {key}"
    for command in (
        f"req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {key} -out {request}",
        f"x509 -req -in {request} {signer} -days {days} -out {cert} -extfile {names}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return cert, key
