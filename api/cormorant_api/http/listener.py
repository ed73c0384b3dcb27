"""One uvicorn server in a thread of its own, with an event loop of its own, and its TLS files."""

import contextlib
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from cormorant_api.errors import HeadFault
from cormorant_api.http.protocol import BoundedProtocol
from cormorant_api.settings import HeadSettings, bound

log = structlog.get_logger()

_START_S = 20.0
_KEEP_ALIVE_S = 75
_BACKLOG = 1024


class Listener:
    """Serves an application on one port from `start` to `stop`."""

    def __init__(self, app: Any, settings: HeadSettings, *, port: int, name: str) -> None:
        """Bind the port; 0: any free one. HeadFault if it is not available."""
        self._socket = bound(settings.host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.grace_s)),
            backlog=_BACKLOG,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        config.load()
        if config.ssl is not None and settings.tls_cert is not None and settings.tls_key is not None:
            reload_when_renewed(config.ssl, settings.tls_cert, settings.tls_key)
        self._grace_s = settings.grace_s
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HeadFault(f"the server on port {self.port} did not start; see its log")
            time.sleep(0.005)

    def stop(self) -> None:
        """Accept no new requests and end the open ones within `grace_s`. May be called twice."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(self._grace_s + 3)
            self._server.force_exit = True
            self._thread.join(3)
        self._socket.close()

    def _serve(self) -> None:
        # Cancelled requests raise here, which is not a failure of this thread.
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])


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
