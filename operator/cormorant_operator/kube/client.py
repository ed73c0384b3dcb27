"""Client of the API server: create, apply, patch, delete, list. The only module that writes to it.

Every request has a timeout, is retried if the server is busy or does not answer, and counts against one rate limit.
"""

import asyncio
import heapq
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Literal

import aiohttp
import kopf

from cormorant_contract.children import api_path
from cormorant_operator import errors, names
from cormorant_operator.names import Manifest

REQUEST_S = 15.0
"""Timeout of one attempt."""
ATTEMPTS = 5
_MAX_WAIT_S = 10.0
_LOGIN_LASTS_S = 60.0
_NO_PATH = "404 page not found"
"""The API server's answer about a kind that it does not serve, the only one without a kind of its own."""
PAGE = 100
"""Objects per request of a list: 100 pods are 4 MB of dictionaries."""
ListedKind = Literal[
    "Pod", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PodGroup", "CollectorJob", "Workload"
]


def find_connection() -> kopf.ConnectionInfo:
    """The pod's service account, else KUBECONFIG or ~/.kube/config. Read each time, because tokens rotate hourly."""
    given: dict[str, Any] = {"settings": kopf.OperatorSettings()}
    credentials = kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)
    if credentials is None:
        raise errors.SettingsError("found neither a service account nor a kubeconfig; set KUBECONFIG")
    return credentials


class KubeClient:
    """Client of one API server. Belongs to one event loop."""

    def __init__(self, rate_limiter: "RateLimiter") -> None:
        try:
            self._info, self._info_at = find_connection(), 0.0
            tls = self._info.as_ssl_context()
        except errors.SettingsError:
            raise
        except Exception as error:  # kopf raises whatever a file makes it raise
            raise errors.SettingsError(f"cannot use the kubeconfig or the service account: {error!r}") from error
        self._rate_limiter = rate_limiter
        self.requests: Counter[tuple[str, int]] = Counter()
        """Responses by method and status code."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=32),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        )

    async def close(self) -> None:
        await self._session.close()

    # -- verbs -------------------------------------------------------------------------------------------------

    async def get(self, kind: str, *, namespace: str, name: str) -> Manifest:
        return await self._ask("GET", api_path(kind, namespace, name))

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> Manifest:
        """Create an object. Raises AlreadyExists if there is one of this name. A dry run refuses unknown fields, which
        are otherwise dropped.
        """
        query = {"fieldManager": names.MANAGER}
        if is_dry_run:
            query |= {"dryRun": "All", "fieldValidation": "Strict"}
        path = api_path(manifest["kind"], manifest["metadata"]["namespace"])
        return await self._ask("POST", path, manifest, query=query)

    async def apply(self, manifest: Mapping[str, Any]) -> Manifest:
        """Server-side apply; changes by others to our fields are reverted."""
        query = {"fieldManager": names.MANAGER, "force": "true"}
        return await self._ask("PATCH", _path_of(manifest), manifest, query=query, kind="apply-patch+yaml")

    async def apply_status(self, manifest: Mapping[str, Any]) -> Manifest:
        """Server-side apply of a job's status. `metadata.uid` is a precondition."""
        query = {"fieldManager": names.STATUS_MANAGER, "force": "true"}
        return await self._ask("PATCH", f"{_path_of(manifest)}/status", manifest, query=query, kind="apply-patch+yaml")

    async def patch(
        self, kind: str, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Manifest:
        path = api_path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return await self._ask("PATCH", path, body, kind="merge-patch+json")

    async def replace(self, manifest: Mapping[str, Any]) -> Manifest:
        """Replace an object; `metadata.resourceVersion` is a precondition."""
        return await self._ask("PUT", _path_of(manifest), manifest)

    async def delete(self, kind: str, *, namespace: str, name: str, preconditions: Mapping[str, str]) -> Manifest:
        """Delete an object; its dependents are deleted in the background. `preconditions`: `uid` and `resourceVersion`;
        another object of this name is left alone.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": dict(preconditions),
        }
        return await self._ask("DELETE", api_path(kind, namespace, name), body)

    async def list(
        self, kind: ListedKind, *, namespace: str = "", selector: str = ""
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        """Yield the objects of a kind page by page, each with the resourceVersion of the list. Where that is gone
        before the last page, all are read again at once, as client-go does.
        """
        whole = {"labelSelector": selector} if selector else {}
        query = {"limit": str(PAGE), **whole}
        while True:
            try:
                page = await self._ask("GET", api_path(kind, namespace), query=query)
            except errors.KubeError as error:
                if error.code != 410 or "continue" not in query:
                    raise
                query = whole
                continue
            # Items of a list lack their kind.
            yield [{**item, "kind": kind} for item in page["items"]], page["metadata"]["resourceVersion"]
            token = page["metadata"].get("continue")
            if not token:
                return
            query = {**query, "continue": token}

    # -- one request -------------------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "json",
    ) -> Manifest:
        """Send a request, with retries. They are safe: names are computed, patches complete, deletions name a uid."""
        error: Exception | None = None
        for attempt in range(ATTEMPTS):
            await self._rate_limiter.wait()
            try:
                return await self._ask_once(method, path, body, query=query, kind=kind)
            except errors.ServerFault as answer:
                error, wait_s = answer, answer.retry_after_s
                if answer.code == 401:
                    self._info_at = -math.inf  # the token may have been rotated: read it again
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error, wait_s = failure, 0.0
            if attempt + 1 < ATTEMPTS:
                backoff_s = 0.2 * 2.0**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(_MAX_WAIT_S, max(wait_s, backoff_s)))
        if isinstance(error, errors.ServerFault):
            raise error
        raise errors.Unreachable(
            f"{method} {path}: no answer from the API server in {ATTEMPTS} attempts of {REQUEST_S:.0f} s: {error!r}"
        ) from error

    async def _ask_once(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, query: Mapping[str, str] | None, kind: str
    ) -> Manifest:
        now = asyncio.get_running_loop().time()
        if now - self._info_at > _LOGIN_LASTS_S:
            self._info, self._info_at = find_connection(), now
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._info.as_http_headers(), "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = f"application/{kind}"
        url = f"{self._info.server.rstrip('/')}/{path}"
        async with self._session.request(method, url, params=query, data=data, headers=headers) as response:
            content = await response.read()
            self.requests[method, response.status] += 1
            try:
                status = json.loads(content)
            except ValueError:
                # A proxy answered instead of the API server.
                status = {"message": content[:200].decode(errors="replace")}
            document: Manifest = status if isinstance(status, dict) else {}
            code, words = response.status, str(document.get("message", "")).strip()
            if "kind" not in document and code < 500 and code not in (401, 429) and words != _NO_PATH:
                code = 502  # a proxy's 403 or 404 says nothing about a template, a pod or a node
            if code < 400:
                return document
            if wait := response.headers.get("Retry-After", ""):
                document.setdefault("details", {}).setdefault(
                    "retryAfterSeconds", float(wait) if wait.isdecimal() else 0
                )
            raise error_of(code, document, request=f"{method} {path}")


def _path_of(manifest: Mapping[str, Any]) -> str:
    return api_path(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def error_of(code: int, document: dict[str, Any], *, request: str) -> errors.KubeError:
    """Build the error for a response; the arguments are those of `KubeError`."""
    kind = errors.KubeError
    if code in (400, 403, 405, 413, 422):
        kind = errors.KubeRefused
    elif code in (401, 408, 429) or code >= 500:
        kind = errors.ServerFault
    elif code == 404:
        kind = errors.KubeNotFound
    elif code == 409:
        kind = errors.AlreadyExists if document.get("reason") == "AlreadyExists" else errors.KubeConflict
    return kind(code, document, request=request)


# -- the rate limit --------------------------------------------------------------------------------------------


class Purpose(Enum):
    """Purpose of a request; the value is the delay of its deadline in seconds."""

    LEASE = -60.0
    """A late renewal loses the lease, so it goes first."""
    PODS = 0.0
    """Pods, and objects that pods need."""
    STATUS = 1.0
    """Conditions, phases and events."""
    COUNTERS = 5.0
    """Counter-only status writes."""
    UPKEEP = 10.0
    """Resyncs."""


_purpose: ContextVar[Purpose] = ContextVar("purpose", default=Purpose.PODS)


@contextmanager
def purpose(of: Purpose) -> Iterator[None]:
    """Set the purpose of requests that this task sends inside the block (default: PODS)."""
    token = _purpose.set(of)
    try:
        yield
    finally:
        _purpose.reset(token)


class RateLimiter:
    """A token bucket with priorities; each request takes one token.

    Waiting requests are served by deadline, and each purpose adds its own delay: pods go before conditions, conditions
    before counters, counters before resyncs, and none starves. The number of tasks bounds how many requests wait at a
    time, so one overdue request delays the others by a few requests only.
    """

    def __init__(self, *, rate: float, burst: int) -> None:
        """Start with a full bucket of `burst` tokens; it gains `rate` tokens per second."""
        self._rate = rate
        self._burst = self._tokens = float(burst)
        self._at: float | None = None
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap by deadline."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Take a token; waits if there is none."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + _purpose.get().value, next(self._order), turn))
        self.hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # A cancelled request got a token: pass it on.
                self._tokens += 1
                self.hand_out()
            raise

    def hand_out(self) -> None:
        """Release as many waiting requests as there are tokens."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # Refilling in fractions may fall short by a rounding error.
        while self._waiting and self._tokens > 1 - 1e-9:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._tokens -= 1
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = loop.call_later((1 - self._tokens) / self._rate, self.hand_out)
