"""A proxy in front of the API server that loses, refuses and breaks off what it is told to. Speaks plain HTTP."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from cormorant_operator.kube.client import find_connection

WRITES = ("POST", "PUT", "PATCH", "DELETE")
_EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "reason": "Expired", "code": 410}}
_HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "authorization"}


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


class FaultyApi:
    """Use as a context manager; `write_kubeconfig` says where it is."""

    def __init__(self, *, seed: int = 0) -> None:
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
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests that the API server did, by method and kind."""
        self.dry_runs = 0
        """Of pods."""
        self.faults = 0
        self.writes = 0
        self.port = 0
        self._random = random.Random(seed)
        self._streams: dict[web.StreamResponse, web.Request] = {}
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "FaultyApi":
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=20)

    def write_kubeconfig(self, path: Path) -> Path:
        return kubeconfig(path, f"http://127.0.0.1:{self.port}")

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

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._info = find_connection()
        connector = aiohttp.TCPConnector(ssl=self._info.as_ssl_context(), limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as session:
            self._session = session
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._is_up.set()
            await self._stop.wait()
            await runner.cleanup()
        await asyncio.sleep(0.25)  # aiohttp's closed TLS connections need turns of the loop to say goodbye

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        is_watch = request.query.get("watch") in ("true", "1")
        fault = self._draw(is_watch=is_watch)
        if fault in ("429", "500", "503"):
            headers = {"Retry-After": "1"} if fault == "429" else {}
            return web.json_response({"kind": "Status", "reason": "Faulty"}, status=int(fault), headers=headers)
        if fault == "409" and request.method in WRITES:
            return web.json_response({"kind": "Status", "reason": "Conflict", "code": 409}, status=409)
        if fault == "410" and is_watch:
            return web.json_response({"kind": "Status", "reason": "Expired", "code": 410}, status=410)
        if self.is_away or fault == "lost":
            return self._hang_up(request)
        url = f"{self._info.server}{request.rel_url}"
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP} | self._info.as_http_headers()
        body = await request.read()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, timeout=timeout
        ) as answer:
            if is_watch:
                return await self._stream(request, answer)
            content = await answer.read()
            self._count(request, answer.status)
        if fault == "answer lost":
            return self._hang_up(request)
        given = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
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


_RESOURCES: Any = {
    "pods",
    "services",
    "configmaps",
    "secrets",
    "events",
    "leases",
    "status",
    "collectorjobs",
}
