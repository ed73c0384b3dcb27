"""The API server, as far as the operator writes to it: create, apply, patch, delete, list. Nobody else does.

Every request has a time limit, is repeated when the server was busy or away, and counts against one budget of requests.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal

import aiohttp
import kopf

from cormorant_operator import names
from cormorant_operator.errors import ApiError, Conflict, NotFound, Refused, ServerFault, Unreachable
from cormorant_operator.kube.rate_limit import RateLimiter

REQUEST_S = 15.0
"""For one attempt."""
ATTEMPTS = 5
_MAX_WAIT_S = 10.0
_LOGIN_LASTS_S = 60.0
_CHUNK = 500
_PLURALS = {
    "Node": "api/v1/nodes",
    "Pod": "api/v1/namespaces/{namespace}/pods",
    "Service": "api/v1/namespaces/{namespace}/services",
    "ConfigMap": "api/v1/namespaces/{namespace}/configmaps",
    "Secret": "api/v1/namespaces/{namespace}/secrets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "Event": "api/v1/namespaces/{namespace}/events",
    "Lease": "apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    "CollectorJob": "apis/cormorant.dev/v1alpha1/namespaces/{namespace}/collectorjobs",
}
_ALL = {
    "Pod": "api/v1/pods",
    "Service": "api/v1/services",
    "ConfigMap": "api/v1/configmaps",
    "NetworkPolicy": "apis/networking.k8s.io/v1/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1/poddisruptionbudgets",
    "CollectorJob": "apis/cormorant.dev/v1alpha1/collectorjobs",
}
ListedKind = Literal["Pod", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "CollectorJob"]
Raw = dict[str, Any]
"""An object as the API server sends it."""


class KubeClient:
    """A client of one API server. Belongs to one event loop."""

    def __init__(
        self, find_connection: Callable[[], kopf.ConnectionInfo], *, rate_limiter: RateLimiter | None = None
    ) -> None:
        """Read where it is; nothing is sent yet.

        Args:
            find_connection: called now, and again every minute for a fresh token.
            rate_limiter: requests per second.
        """
        self._find = find_connection
        self._info = find_connection()
        self._info_at = 0.0
        self._rate_limiter = rate_limiter or RateLimiter(rate=50, burst=100)
        self.requests: Counter[tuple[str, int]] = Counter()
        """Answers by method and status code."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._info.as_ssl_context(), limit=32),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
        )

    async def close(self) -> None:
        """Close every connection. May be called twice."""
        await self._session.close()

    # -- verbs -------------------------------------------------------------------------------------------------

    async def get(self, kind: str, *, namespace: str, name: str) -> Raw:
        return await self._ask("GET", f"{_path(kind, namespace)}/{name}")

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> Raw:
        """Create an object.

        Raises:
            Conflict: there is one of this name.
            Refused: the server does not want it.
        """
        query = {"fieldManager": names.MANAGER} | ({"dryRun": "All"} if is_dry_run else {})
        path = _path(manifest["kind"], manifest["metadata"]["namespace"])
        return await self._ask("POST", path, manifest, query=query)

    async def apply(self, manifest: Mapping[str, Any]) -> Raw:
        """Bring an object about, by server-side apply; what others changed of our fields is taken back."""
        query = {"fieldManager": names.MANAGER, "force": "true"}
        return await self._ask("PATCH", _path_of(manifest), manifest, query=query, kind="apply-patch+yaml")

    async def apply_status(self, manifest: Mapping[str, Any]) -> Raw:
        """Write a job's status, by server-side apply. `metadata.uid` in it is a precondition."""
        query = {"fieldManager": names.STATUS_MANAGER, "force": "true"}
        return await self._ask("PATCH", f"{_path_of(manifest)}/status", manifest, query=query, kind="apply-patch+yaml")

    async def patch(self, kind: str, *, namespace: str, name: str, body: Mapping[str, Any]) -> Raw:
        """Merge a patch into an object."""
        return await self._ask("PATCH", f"{_path(kind, namespace)}/{name}", body, kind="merge-patch+json")

    async def replace(self, manifest: Mapping[str, Any]) -> Raw:
        """Replace an object; `metadata.resourceVersion` in it is a precondition."""
        return await self._ask("PUT", _path_of(manifest), manifest)

    async def delete(
        self,
        kind: str,
        *,
        namespace: str,
        name: str,
        preconditions: Mapping[str, str],
    ) -> Raw:
        """Delete an object, what it owns in the background.

        Args:
            kind: of the object.
            namespace: where it is.
            name: its name.
            preconditions: `uid`, `resourceVersion`: another object of this name is left alone.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": dict(preconditions),
        }
        return await self._ask("DELETE", f"{_path(kind, namespace)}/{name}", body)

    async def list(
        self, kind: ListedKind, *, namespace: str = "", selector: str = ""
    ) -> AsyncIterator[tuple[list[Raw], str]]:
        """Every object of a kind, page by page, and the version of the world that the list shows.

        Ten thousand pods at once are 400 MB of dictionaries.
        """
        path = _path(kind, namespace) if namespace else _ALL[kind]
        query = {"limit": str(_CHUNK)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._ask("GET", path, query=query)
            # Items of a list do not say what they are.
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
    ) -> Raw:
        """Send a request until it is answered for good.

        Repeating is safe: names are computed, patches are whole, deletions name a uid.

        Raises:
            ApiError: what the server answered.
            Unreachable: it did not answer.
        """
        error: Exception | None = None
        for attempt in range(ATTEMPTS):
            await self._rate_limiter.wait()
            try:
                return await self._ask_once(method, path, body, query=query, kind=kind)
            except ServerFault as answer:
                error, wait_s = answer, answer.retry_after_s
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error, wait_s = failure, 0.0
            if attempt + 1 < ATTEMPTS:
                backoff_s = 0.2 * 2.0**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(_MAX_WAIT_S, max(wait_s, backoff_s)))
        if isinstance(error, ServerFault):
            raise error
        raise Unreachable(
            f"{method} {path}: no answer from the API server in {ATTEMPTS} attempts of {REQUEST_S:.0f} s: {error!r}"
        ) from error

    async def _ask_once(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, query: Mapping[str, str] | None, kind: str
    ) -> Raw:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._login(), "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = f"application/{kind}"
        url = f"{self._info.server.rstrip('/')}/{path}"
        async with self._session.request(method, url, params=query, data=data, headers=headers) as response:
            content = await response.read()
            self.requests[method, response.status] += 1
            document = _read_json(content)
            if response.status < 400:
                return document
            if wait := response.headers.get("Retry-After", ""):
                document.setdefault("details", {}).setdefault(
                    "retryAfterSeconds", float(wait) if wait.isdecimal() else 0
                )
            raise error_of(response.status)(response.status, document, request=f"{method} {path}")

    def _login(self) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        if now - self._info_at > _LOGIN_LASTS_S:
            self._info, self._info_at = self._find(), now
        return self._info.as_http_headers()


def _path(kind: str, namespace: str) -> str:
    return _PLURALS[kind].format(namespace=namespace)


def _path_of(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    return f"{_path(manifest['kind'], metadata['namespace'])}/{metadata['name']}"


def error_of(code: int) -> type[ApiError]:
    """What an answer of this status code is."""
    if code in (400, 401, 403, 405, 413, 422):
        return Refused
    if code in (408, 429) or code >= 500:
        return ServerFault
    return {404: NotFound, 409: Conflict}.get(code, ApiError)


def _read_json(content: bytes) -> Raw:
    try:
        document = json.loads(content)
    except ValueError:
        # A proxy answered, and not the API server.
        return {"message": content[:200].decode(errors="replace")}
    return document if isinstance(document, dict) else {}
