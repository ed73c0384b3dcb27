"""TLS files: checked before the head listens, and reloaded when they are renewed."""

import ssl
from pathlib import Path

import structlog

from cormorant_api.errors import HeadFault

log = structlog.get_logger()


def check_tls(cert: Path, key: Path) -> None:
    """Check that a server can use these files; HeadFault if not. Does not check expiry: clients do."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise HeadFault(f"cannot use {cert} with {key} for TLS: {error}") from error


def reload_when_renewed(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Have a server use a renewed certificate, at the latest from the second connection after the files changed. Files
    that do not match, as during their replacement, leave the earlier certificate in use.
    """
    shown = _stamp(cert)

    def look(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        nonlocal shown
        found = _stamp(cert)
        if found in (shown, 0):
            return
        try:
            check_tls(cert, key)
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError, HeadFault) as error:
            log.warning("certificate_not_renewed", reason=str(error))
        else:
            shown = found
            log.info("certificate_renewed", cert=str(cert))

    context.sni_callback = look


def _stamp(cert: Path) -> int:
    """A value that changes with the file; 0: there is no file."""
    try:
        return cert.stat().st_mtime_ns
    except OSError:
        return 0
