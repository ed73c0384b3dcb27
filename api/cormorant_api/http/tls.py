"""Checks TLS files before the head listens, so that an expired certificate is refused with a clear message."""

import ssl
from contextlib import suppress
from pathlib import Path

import structlog

from cormorant_api.errors import TlsError

log = structlog.get_logger()

_EXPIRED = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""
_NOT_YET_VALID = 9


def check_tls(cert: Path, key: Path) -> None:
    """Check that a server can use these files now; a TlsError says why not."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        server.load_cert_chain(cert, key)
        client.load_verify_locations(cert)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"cannot use {cert} with {key} for TLS: {error}") from error
    client.check_hostname = False
    # Trust the certificate itself: only its dates are checked, not its issuer.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        # A handshake in memory, so that OpenSSL checks the certificate as a client would. Each side needs three turns.
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = server.wrap_bio(to_server, to_client, server_side=True)
        theirs = client.wrap_bio(to_client, to_server, server_side=False)
        for end in (theirs, ours) * 3:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise TlsError(f"the certificate in {cert} has expired; renew it") from error
        if error.verify_code == _NOT_YET_VALID:
            raise TlsError(f"the certificate in {cert} is not valid yet; check this machine's clock") from error
        raise TlsError(f"the certificate in {cert} cannot be used: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise TlsError(f"the certificate in {cert} cannot be used: {error}") from error


def reload_when_renewed(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Have a server show a renewed certificate, at the latest from the second connection after the files changed.

    Files that do not fit each other, as while they are being replaced, leave the earlier certificate in use.
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
        except (OSError, ssl.SSLError, TlsError) as error:
            log.warning("certificate_not_renewed", reason=str(error))
        else:
            shown = found
            log.info("certificate_renewed", cert=str(cert))

    context.sni_callback = look


def _stamp(cert: Path) -> int:
    """Changes with the file; 0: it is not there."""
    try:
        return cert.stat().st_mtime_ns
    except OSError:
        return 0
