"""Counts and times requests per route template, and answers those that a closing head cancels."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.problems import ProblemResponse, make_problem

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
        status, began = 0, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            # uvicorn would answer 500, which a learner takes for the end of its job.
            if status:
                raise
            try:
                self._head.refuse_while_closing()
            except ApiError as closing:
                await ProblemResponse(make_problem(closing, scope["path"]))(scope, receive, noting)
            else:
                raise
        finally:
            # The route template, not the path: clients may make up any number of paths.
            route = getattr(scope.get("route"), "path", "unknown")
            self._head.metrics.answered(
                method=scope["method"], route=route, status=status or _NO_ANSWER, seconds=time.monotonic() - began
            )
