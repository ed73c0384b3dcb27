"""Proxies in front of an API server: one loses, refuses and breaks off what it is told to, the other writes down which
right every request needs, and how it was answered. Both speak plain HTTP.
"""

import asyncio
import json
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web

from cormorant_operator.kube.client import find_connection

WRITES = ("POST", "PUT", "PATCH", "DELETE")
_EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "reason": "Expired", "code": 410}}
_HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length"}


class ApiProxy:
    """Use as a context manager. Handles requests in a thread of its own."""

    port = 0
    _auto_decompress = False
    """False: what a server compresses is passed on as it is."""

    def __init__(self, server: str, tls: Any) -> None:
        self._server, self._tls = server, tls
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=self._auto_decompress
        ) as self._session:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            self._is_up.set()
            await self._stop.wait()
            await runner.cleanup()
        await asyncio.sleep(0.25)  # aiohttp's closed TLS connections need turns of the loop to say goodbye

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


def kubeconfig(path: Path, url: str) -> Path:
    """Write a kubeconfig for a server that asks for no credentials."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


class FaultyApi(ApiProxy):
    """Loses, refuses and breaks off; asks with the credentials of KUBECONFIG. `write_kubeconfig` says where it is."""

    _auto_decompress = True

    def __init__(self, *, seed: int = 0) -> None:
        self._info = find_connection()
        super().__init__(self._info.server, self._info.as_ssl_context())
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

    def write_kubeconfig(self, path: Path) -> Path:
        return kubeconfig(path, self.url)

    def go_away(self) -> None:
        """Every watch is cut off, and nothing is answered until `is_away` is taken back."""
        self.is_away = True
        self._loop.call_soon_threadsafe(lambda: [self._hang_up(request) for request in self._streams.values()])

    def expire_watches(self) -> None:
        """Every open watch is told within its stream that its version is too old; then they tell everything again."""
        asyncio.run_coroutine_threadsafe(self._expire_watches(), self._loop).result(timeout=10)
        self.is_deaf = False

    async def _expire_watches(self) -> None:
        for response in tuple(self._streams):
            with suppress(ConnectionResetError):
                await response.write(json.dumps(_EXPIRED).encode() + b"\n")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        is_watch = request.query.get("watch") in ("true", "1")
        fault = self.judge(request) or self._draw(is_watch=is_watch)
        if fault in ("429", "500", "503"):
            headers = {"Retry-After": "1"} if fault == "429" else {}
            return web.json_response({"kind": "Status", "reason": "Faulty"}, status=int(fault), headers=headers)
        if fault == "409" and request.method in WRITES:
            return web.json_response({"kind": "Status", "reason": "Conflict", "code": 409}, status=409)
        if fault == "410" and is_watch:
            return web.json_response({"kind": "Status", "reason": "Expired", "code": 410}, status=410)
        if self.is_away or fault == "lost":
            return self._hang_up(request)
        left_out = _HOP_BY_HOP | {"content-encoding", "authorization"}
        headers = {k: v for k, v in request.headers.items() if k.lower() not in left_out}
        async with self._session.request(
            request.method,
            f"{self._server}{request.rel_url}",
            headers=headers | self._info.as_http_headers(),
            data=await request.read() or None,
        ) as answer:
            if is_watch:
                return await self._stream(request, answer)
            content = await answer.read()
            self._count(request, answer.status)
        if fault == "answer lost":
            return self._hang_up(request)
        given = {k: v for k, v in answer.headers.items() if k.lower() not in left_out}
        return web.Response(status=answer.status, body=content, headers=given)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        limit_s = self._random.uniform(0.5, 1.5) * self.stream_s if self.stream_s else None
        self._streams[response] = request
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in answer.content.iter_any():
                    if not self.is_deaf:
                        await response.write(chunk)
        except TimeoutError:
            self.faults += 1
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            pass  # the client went first
        finally:
            del self._streams[response]
        return response

    def _hang_up(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _draw(self, *, is_watch: bool) -> str:
        if self._random.random() >= self.rate:
            return ""
        self.faults += 1
        return self._random.choice(["429", "500", "503", "409", "410", "lost", "" if is_watch else "answer lost"])

    def _count(self, request: web.Request, status: int) -> None:
        kind = request.path.rstrip("/").split("/")
        resource = next((part for part in reversed(kind) if part in _RESOURCES), "other")
        if status < 400:
            self.requests[request.method, resource] += 1
            self.dry_runs += resource == "pods" and "dryRun" in request.query
        if request.method in WRITES and status < 400 and "dryRun" not in request.query:
            self.writes += 1
            self.after_write(self.writes)


_RESOURCES = {"pods", "services", "configmaps", "secrets", "events", "leases", "status", "collectorjobs"}


class Right(NamedTuple):
    """One right as a rule of RBAC grants it; the name of a subresource follows its resource's."""

    group: str
    resource: str
    verb: str


def right_of(method: str, path: str, *, is_watch: bool) -> Right | None:
    """The right that a request needs; None for what everybody may ask, as discovery.

    >>> right_of("PATCH", "/apis/cormorant.dev/v1alpha1/namespaces/a/collectorjobs/b/status", is_watch=False)
    Right(group='cormorant.dev', resource='collectorjobs/status', verb='patch')
    """
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return None
    if not rest:
        return None
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    resource = "/".join([rest[0], *rest[2:]])
    is_named = len(rest) > 1
    if method == "GET":
        verb = "get" if is_named else "watch" if is_watch else "list"
    else:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]
        if verb == "delete" and not is_named:
            verb = "deletecollection"
    return Right(group=group, resource=resource, verb=verb)


class RecordingProxy(ApiProxy):
    """Writes down rights; `url` stands for the API server's. Callers bring their own tokens."""

    def __init__(self, server: str, *, ca: str) -> None:
        super().__init__(server, ssl.create_default_context(cadata=ca))
        self.used: set[Right] = set()
        self.denied: set[Right] = set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = f"{self._server}{request.raw_path}"
        body = await request.read() or None
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            self._write_down(request, answer.status)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            # Whoever watches goes when it likes, and need not wait for the next event.
            with suppress(ConnectionResetError):
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response

    def _write_down(self, request: web.Request, status: int) -> None:
        right = right_of(request.method, request.path, is_watch=request.query.get("watch") in ("true", "1"))
        if right is None:
            return
        # A quota or an admission plugin answers 403 too; those of tests forbid nothing.
        (self.denied if status == 403 else self.used).add(right)
        if right.verb == "patch" and status == 201:
            # Applying what does not exist is creating it.
            self.used.add(right._replace(verb="create"))
