"""A proxy in front of an API server that writes down which right every request needs, and how it was answered."""

import asyncio
import ssl
import threading
from contextlib import suppress
from typing import NamedTuple

import aiohttp
from aiohttp import web

_HOP_BY_HOP = {"Host", "Transfer-Encoding", "Content-Length", "Connection"}


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


class RecordingProxy:
    """Use as a context manager; `url` stands for the API server's. Callers bring their own tokens."""

    def __init__(self, server: str, *, ca: str) -> None:
        self._server, self._tls = server, ssl.create_default_context(cadata=ca)
        self.used: set[Right] = set()
        self.denied: set[Right] = set()
        self.url = ""
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "RecordingProxy":
        self._thread.start()
        assert self._ready.wait(timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    async def _serve(self) -> None:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        timeout = aiohttp.ClientTimeout(total=None)
        # What a server compresses is passed on as it is.
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)
            await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        url = f"{self._server}{request.raw_path}"
        body = await request.read() or None
        async with self._session.request(request.method, url, data=body, headers=headers, ssl=self._tls) as answer:
            self._write_down(request, answer.status)
            kept = {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}
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
