"""Shared by all routes: authorization, checked before the body is read, and documented errors."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.settings import is_loopback
from cormorant_contract.rest.base import PROBLEM_JSON
from cormorant_contract.rest.problems import ProblemType

log = structlog.get_logger()

_READING = frozenset({"GET", "HEAD"})
_ACTING = ("/v1/batches", "/v1/state")
"""A GET of these paths has side effects: it takes batches or pauses the fleet."""
_OURS = frozenset({"same-origin", "none"})
"""Accepted values of Sec-Fetch-Site. `same-site` would include other ports, where any page may be served."""
_JSON_WITHIN_S = 20.0
BINARY = {"schema": {"type": "string", "format": "binary"}}
EVENT_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
MOST_JSON_BYTES = 256 * 1024
ROLE_KEY = "x-cormorant-role"
_PROBLEM_SCHEMA = {"$ref": "#/components/schemas/Problem"}

_ALWAYS = (
    ProblemType.MALFORMED_REQUEST,
    ProblemType.UNAUTHENTICATED,
    ProblemType.FORBIDDEN,
    ProblemType.TOO_LARGE,
    ProblemType.INVALID_REQUEST,
    ProblemType.NO_WORKERS,
    ProblemType.DRAINING,
    ProblemType.OVERLOADED,
    ProblemType.FLEET_FAILED,
    ProblemType.CONTROL_TIMEOUT,
)

Answers = dict[int | str, dict[str, Any]]


def guarded(role: Role, *kinds: ProblemType, also: Answers | None = None, **extra: Any) -> dict[str, Any]:
    """Keyword arguments of a route that requires a role, for OpenAPI and `GuardedRoute`.

    Args:
        kinds: problems of this route, in addition to those of every route.
        extra: further members of the operation.
    """
    answers: dict[int, dict[str, Any]] = {}
    for kind in (*_ALWAYS, *kinds):
        example = {"type": kind.uri, "title": kind.value.replace("-", " ").capitalize(), "status": kind.status}
        answers.setdefault(kind.status, {})[kind.value] = {"value": example}
    problems: Answers = {
        status: {
            "description": "Problem: " + ", ".join(examples),
            "content": {PROBLEM_JSON: {"schema": _PROBLEM_SCHEMA, "examples": examples}},
        }
        for status, examples in answers.items()
    }
    members = {ROLE_KEY: role.name.lower(), "security": [{"bearer": []}], **extra}
    return {"responses": problems | (also or {}), "openapi_extra": members}


class GuardedRoute(APIRoute):
    """A route that checks the token first. Routes without a role are open."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler, which reads bodies."""
        handle = super().get_route_handler()
        name = (self.openapi_extra or {}).get(ROLE_KEY, "")
        if not name:
            return handle
        needed = Role[name.upper()]

        async def handle_checked(request: Request) -> Response:
            head: Head = request.app.state.head
            what = f"{request.method} {self.path}"
            if not head.tokens.by_role:
                refuse_other_hosts(request.headers, listens_on=head.settings.host, what=what)
                if request.method not in _READING or self.path.startswith(_ACTING):
                    refuse_cross_origin(request.headers, what=what)
            request.state.role = head.tokens.demand(needed, request.headers.get("authorization"), what=what)
            if self.body_field is None:
                return await handle(request)
            # FastAPI sets no limit on a JSON body.
            return await handle(Request(request.scope, bounded(request.receive)))

        return handle_checked


# A head without tokens: any web page in the user's browser could otherwise pause a job on this machine. Programs send
# none of these headers, and the head's own page is same-origin. DNS rebinding makes a foreign page same-origin for the
# browser; its requests carry the foreign name as Host.


def refuse_cross_origin(headers: Mapping[str, str], *, what: str) -> None:
    """Refuse a request that a browser sends for a page of another origin (403). `headers` have lower-case names."""
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    is_other = site not in _OURS if site else bool(origin) and urlsplit(origin).netloc != headers.get("host", "")
    if is_other:
        whose = f"Origin {origin[:200]}" if origin else f"Sec-Fetch-Site {site[:20]}"
        raise ApiError(
            ProblemType.FORBIDDEN,
            f"{what} comes from a page of another site ({whose}), and this head runs without tokens; use the head's "
            "own page or a program, or start the head with tokens",
        )


def refuse_other_hosts(headers: Mapping[str, str], *, listens_on: str, what: str) -> None:
    """Refuse a Host that is not localhost, a loopback address or the address that the head listens on (403)."""
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if host in ("", listens_on) or host.endswith(".localhost") or is_loopback(host):
        return
    raise ApiError(
        ProblemType.FORBIDDEN,
        f"{what} has the Host {host[:200]!r}, and a head without tokens only serves localhost; use http://localhost, "
        "or start the head with tokens",
    )


def bounded(receive: Receive) -> Receive:
    """Limit the size and the duration of a small body."""
    taken, until = 0, time.monotonic() + _JSON_WITHIN_S

    async def receive_bounded() -> Message:
        nonlocal taken
        try:
            async with asyncio.timeout(until - time.monotonic()):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"the body was not complete after {_JSON_WITHIN_S:.0f} s ({taken:,} bytes came); nothing was changed",
            ) from None
        taken += len(message.get("body", b""))
        if taken > MOST_JSON_BYTES:
            # HTTPException is the one class that FastAPI's JSON reader lets through.
            raise HTTPException(413, f"the body is longer than the limit of {MOST_JSON_BYTES:,} bytes")
        return message

    return receive_bounded


async def _head_of(request: Request) -> Head:  # FastAPI calls a function that is not async in a thread
    head: Head = request.app.state.head
    return head


TheHead = Annotated[Head, Depends(_head_of)]
"""Route parameter: the application's head."""


def author_of(request: Request) -> str:
    """Role and address of the caller, for logs and authorship."""
    role: Role = request.state.role
    host = request.client.host if request.client is not None else "unknown"
    return f"{role.name.lower()}@{host}"
