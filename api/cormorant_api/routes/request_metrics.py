"""Counts and times requests per route template."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cormorant_api.head import Head

_QUIET = frozenset({"/livez", "/readyz", "/startupz", "/healthz", "/metrics"})
_NO_ANSWER = 500


class RequestMetrics:
    """ASGI middleware. Probes and scrapes are not counted."""

    def __init__(self, app: ASGIApp, head: Head) -> None:
        self._app, self._head = app, head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        status, began = _NO_ANSWER, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # The route template, not the path: clients may make up any number of paths.
            route = getattr(scope.get("route"), "path", "unknown")
            self._head.metrics.answered(
                method=scope["method"], route=route, status=status, seconds=time.monotonic() - began
            )
