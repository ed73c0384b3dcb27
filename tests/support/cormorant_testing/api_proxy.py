"""Proxies in front of an API server: one loses, refuses and breaks off what it is told to, the other writes down which
right every request needs, and how it was answered. Both speak plain HTTP.
"""

import asyncio
import json
import random
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web

from cormorant_operator.kube.client import find_connection

WRITES = ("POST", "PUT", "PATCH", "DELETE")
_EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "reason": "Expired", "code": 410}}
_HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length"}
_RESOURCES = {"pods", "services", "configmaps", "secrets", "events", "leases", "status", "collectorjobs"}


def write_kubeconfig(path: Path, url: str, token: str = "", namespace: str = "default") -> Path:
    """Write a kubeconfig whose context `here` is of a server; without a token, one that asks for no credentials."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "here",
    }
    path.write_text(json.dumps(document))
    return path


def is_watch(request: web.Request) -> bool:
    return request.query.get("watch") in ("true", "1")


class ApiProxy:
    """Passes everything on, byte by byte, in a thread of its own. Use as a context manager."""

    def __init__(self, server: str, tls: Any, *, credentials: Mapping[str, str] | None = None) -> None:
        """`credentials`: headers in place of the callers' own."""
        self._server, self._tls, self._credentials = server, tls, credentials
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(timeout=30)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_up.set()
        await self._over.wait()
        await runner.cleanup()
        await self._session.close()
        await asyncio.sleep(0.25)  # aiohttp's closed TLS connections need turns of the loop to say goodbye

    async def answer(self, request: web.Request) -> web.StreamResponse:
        left_out = _HOP_BY_HOP | ({"authorization"} if self._credentials is not None else set())
        headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
        async with self._session.request(
            request.method,
            f"{self._server}{request.raw_path}",
            headers={**headers, **(self._credentials or {})},
            data=await request.read() or None,
        ) as answer:
            self.note(request, answer.status)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            # Whoever watches goes when it likes, and need not wait for the next event.
            with suppress(ConnectionResetError):
                await response.prepare(request)
                await self.copy(answer, request, response)
            return response

    def note(self, request: web.Request, status: int) -> None:
        """The API server did a request."""

    async def copy(self, answer: aiohttp.ClientResponse, request: web.Request, response: web.StreamResponse) -> None:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)


class FaultyApi(ApiProxy):
    """Loses, refuses and breaks off; asks with the credentials of KUBECONFIG."""

    def __init__(self, *, seed: int = 0) -> None:
        info = find_connection()
        super().__init__(info.server, info.as_ssl_context(), credentials=info.as_http_headers())
        self.rate = 0.0
        """Share of requests that fail, before or after the API server did what they ask."""
        self.stream_s = 0.0
        """Watches break off after about so long; 0: never."""
        self.is_away = False
        """Nothing is answered."""
        self.is_deaf = False
        """Watches tell nothing: what happens meanwhile is not heard of."""
        self.after_write: Callable[[int], None] = lambda number: None
        """Called after each write was done and before its answer is given."""
        self.judge: Callable[[web.Request], str] = lambda request: ""
        """Names the fault of a request, as `_draw` does; empty: chance decides."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests that the API server did, by method and kind."""
        self.dry_runs = 0
        """Of pods."""
        self.faults = 0
        self.writes = 0
        self._random = random.Random(seed)
        self._streams: dict[web.StreamResponse, web.Request] = {}

    def go_away(self) -> None:
        """Every watch is cut off, and nothing is answered until `is_away` is taken back."""
        self.is_away = True
        self._loop.call_soon_threadsafe(lambda: [_hang_up(request) for request in self._streams.values()])

    def expire_watches(self) -> None:
        """Every open watch is told within its stream that its version is too old; then they tell everything again."""
        asyncio.run_coroutine_threadsafe(self._expire_watches(), self._loop).result(timeout=10)
        self.is_deaf = False

    async def _expire_watches(self) -> None:
        for response in tuple(self._streams):
            with suppress(ConnectionResetError):
                await response.write(json.dumps(_EXPIRED).encode() + b"\n")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        fault = self.judge(request) or self._draw(request)
        if fault in ("429", "500", "503"):
            headers = {"Retry-After": "1"} if fault == "429" else {}
            return web.json_response({"kind": "Status", "reason": "Faulty"}, status=int(fault), headers=headers)
        if fault == "409" and request.method in WRITES:
            return web.json_response({"kind": "Status", "reason": "Conflict", "code": 409}, status=409)
        if fault == "410" and is_watch(request):
            return web.json_response(_EXPIRED["object"], status=410)
        request["is_lost"] = fault == "answer lost"
        return _hang_up(request) if self.is_away or fault == "lost" else await super().answer(request)

    async def copy(self, answer: aiohttp.ClientResponse, request: web.Request, response: web.StreamResponse) -> None:
        if not is_watch(request):
            return await super().copy(answer, request, response)
        limit_s = self._random.uniform(0.5, 1.5) * self.stream_s if self.stream_s else None
        self._streams[response] = request
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in answer.content.iter_any():
                    if not self.is_deaf:
                        await response.write(chunk)
        except TimeoutError:
            self.faults += 1
            _hang_up(request)
        finally:
            del self._streams[response]

    def _draw(self, request: web.Request) -> str:
        if self._random.random() >= self.rate:
            return ""
        self.faults += 1
        faults = ["429", "500", "503", "409", "410", "lost"]
        return self._random.choice([*faults, "" if is_watch(request) else "answer lost"])

    def note(self, request: web.Request, status: int) -> None:
        if status < 400:
            words = reversed(request.path.rstrip("/").split("/"))
            resource, is_dry = next((word for word in words if word in _RESOURCES), "other"), "dryRun" in request.query
            self.requests[request.method, resource] += 1
            self.dry_runs += resource == "pods" and is_dry
            if request.method in WRITES and not is_dry:
                self.writes += 1
                self.after_write(self.writes)
        if request["is_lost"]:
            _hang_up(request)


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


_ASKED = re.compile(r"/(?:api|apis/([^/]+))/[^/]+(?:/namespaces/[^/]+(?=/))?/([^/]+)(?:/([^/]+)(/.+)?)?")
"""The path of a request: API group, resource, name, and what is below the object."""
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Right(NamedTuple):
    """One right as a rule of RBAC grants it; the name of a subresource follows its resource's."""

    group: str
    resource: str
    verb: str


class RecordingProxy(ApiProxy):
    """Writes down rights; `url` stands for the API server's. Callers bring their own tokens."""

    def __init__(self, server: str, *, ca: str) -> None:
        super().__init__(server, ssl.create_default_context(cadata=ca))
        self.used: set[Right] = set()
        self.denied: set[Right] = set()

    def note(self, request: web.Request, status: int) -> None:
        found = _ASKED.fullmatch(request.path.rstrip("/"))
        if found is None:  # what everybody may ask, as discovery
            return
        group, resource, name, below = found.groups("")
        verb = _VERBS.get(request.method) or ("get" if name else "watch" if is_watch(request) else "list")
        verb = "deletecollection" if verb == "delete" and not name else verb
        right = Right(group, resource + below, verb)
        # A quota or an admission plugin answers 403 too; those of tests forbid nothing.
        (self.denied if status == 403 else self.used).add(right)
        if right.verb == "patch" and status == 201:
            # Applying what does not exist is creating it.
            self.used.add(right._replace(verb="create"))
