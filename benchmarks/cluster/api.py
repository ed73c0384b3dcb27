"""The API server, as the benchmark speaks to it: jobs are made, pods deleted and watched, its own metrics read."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.cluster.addresses import next_address
from cormorant_operator.kube.client import find_connection

Raw = dict[str, Any]
ANSWER_S = 60.0
_STARTED_AT_ONCE = 32
_SAMPLE = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>[0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PODS, _JOBS = "api/v1/namespaces/{}/pods", "apis/cormorant.dev/v1alpha1/namespaces/{}/collectorjobs"


class Api:
    """One namespace of it. Use as an async context manager."""

    def __init__(self, namespace: str) -> None:
        self._info = find_connection()
        self._pods, self._jobs = _PODS.format(namespace), _JOBS.format(namespace)

    async def __aenter__(self) -> "Api":
        connector = aiohttp.TCPConnector(ssl=self._info.as_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._info.as_http_headers())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def create_job(self, manifest: Raw) -> None:
        await self._ask("POST", self._jobs, body=manifest)

    async def jobs(self) -> list[Raw]:
        found, _ = await self._list(self._jobs)
        return found

    async def delete_job(self, name: str) -> None:
        await self._ask("DELETE", f"{self._jobs}/{name}", body={"propagationPolicy": "Background"})

    async def pods(self) -> tuple[list[Raw], str]:
        """All that exist, and the version as of which they do."""
        return await self._list(self._pods)

    async def delete_pod(self, name: str) -> None:
        await self._ask("DELETE", f"{self._pods}/{name}")

    async def say(self, pod: str, status: Raw) -> None:
        """Write a pod's status, as its kubelet would."""
        await self._ask("PATCH", f"{self._pods}/{pod}/status", body={"status": status}, kind="merge-patch+json")

    async def requests(self) -> Counter[tuple[str, str, str]]:
        """Requests that the server did since it started, by resource, subresource and verb."""
        async with self._session.get(f"{self._info.server}/metrics", timeout=_timeout(ANSWER_S)) as answer:
            answer.raise_for_status()
            text = await answer.text()
        found: Counter[tuple[str, str, str]] = Counter()
        for sample in _SAMPLE.finditer(text):
            labels = dict(_LABEL.findall(sample["labels"]))
            if labels["group"] in ("", "cormorant.dev"):
                found[labels["resource"], labels["subresource"], labels["verb"]] += int(float(sample["count"]))
        return found

    async def watch_pods(self, since: str, see: Callable[[str, Raw], None]) -> None:
        """Pass every event after a version on until the stream ends."""
        query = {"watch": "1", "resourceVersion": since, "allowWatchBookmarks": "true"}
        url = f"{self._info.server}/{self._pods}"
        async with self._session.get(url, params=query, timeout=_timeout(None), read_bufsize=1 << 24) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                see(event["type"], event["object"])

    async def _list(self, path: str) -> tuple[list[Raw], str]:
        found: list[Raw] = []
        query = {"limit": "500"}
        while True:
            page = await self._ask("GET", path, query=query)
            found += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return found, str(page["metadata"]["resourceVersion"])
            query["continue"] = token

    async def _ask(
        self, method: str, path: str, *, body: Raw | None = None, query: Raw | None = None, kind: str = "json"
    ) -> Raw:
        async with self._session.request(
            method,
            f"{self._info.server}/{path}",
            params=query,
            data=json.dumps(body) if body is not None else None,
            headers={"Content-Type": f"application/{kind}"},
            timeout=_timeout(ANSWER_S),
        ) as answer:
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {(await answer.text())[:500]}")
            return dict(await answer.json())


def _timeout(seconds: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=10)


@dataclass(frozen=True, slots=True)
class SeenPod:
    """What the benchmark remembers of a pod."""

    name: str
    job: str
    slot: str
    """`<group>-<index>`, or `head`."""
    created_at: float
    """When its creation was seen, monotonic."""


class PodWatch:
    """Every pod of a namespace, and when it came and went. Use as an async context manager."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.pods: dict[str, SeenPod] = {}
        """By uid; those that exist."""
        self.waiting: dict[str, str] = {}
        """Names of pods that were not started, by uid."""
        self.created = self.deleted = 0

    async def __aenter__(self) -> "PodWatch":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def of(self, job: str) -> list[SeenPod]:
        return [pod for pod in self.pods.values() if pod.job == job]

    def in_slot(self, job: str, slot: str) -> dict[str, SeenPod]:
        return {uid: pod for uid, pod in self.pods.items() if (pod.job, pod.slot) == (job, slot)}

    async def until(self, is_so: Callable[[], object], *, what: str, within_s: float) -> float:
        """Wait for a fact of the pods. Returns the seconds that it took."""
        return await until(self._checked(is_so), what=what, within_s=within_s, every_s=0.01)

    def _checked(self, is_so: Callable[[], object]) -> Callable[[], Awaitable[object]]:
        async def check() -> object:
            if self._task.done():
                self._task.result()
            return is_so()

        return check

    async def _run(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                # The API server ends the watch of a slow reader; from the list's version on nothing is missed.
                listed, version = await self._api.pods()
                for pod in listed:
                    self._see("LISTED", pod)
                for uid in self.pods.keys() - {pod["metadata"]["uid"] for pod in listed}:
                    del self.pods[uid]
                    self.waiting.pop(uid, None)
                    self.deleted += 1
                await self._api.watch_pods(version, self._see)
            await asyncio.sleep(0.5)

    def _see(self, event: str, pod: Raw) -> None:
        if event == "BOOKMARK":
            return
        metadata = pod["metadata"]
        uid, labels = metadata["uid"], metadata.get("labels") or {}
        if event == "DELETED":
            self.waiting.pop(uid, None)
            self.deleted += self.pods.pop(uid, None) is not None
            return
        if uid not in self.pods:
            self.created += 1
            slot = f"{labels.get('cormorant.dev/group')}-{labels.get('cormorant.dev/index')}"
            self.pods[uid] = SeenPod(
                name=metadata["name"],
                job=labels.get("cormorant.dev/collectorjob", ""),
                slot="head" if labels.get("cormorant.dev/role") == "head" else slot,
                created_at=time.monotonic(),
            )
        if pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in metadata:
            self.waiting[uid] = metadata["name"]
        else:
            self.waiting.pop(uid, None)


async def until(is_so: Callable[[], Awaitable[object]], *, what: str, within_s: float, every_s: float = 0.5) -> float:
    """Wait for a fact. Returns the seconds that it took."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if await is_so():
            return time.monotonic() - began
        await asyncio.sleep(every_s)
    raise TimeoutError(f"not within {within_s:.0f} s: {what}")


class Kubelet:
    """Starts every pod that waits, where no node does. Use as an async context manager."""

    def __init__(self, api: Api, watch: PodWatch) -> None:
        self._api, self._watch = api, watch

    async def __aenter__(self) -> "Kubelet":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            names = list(self._watch.waiting.values())[:_STARTED_AT_ONCE]
            for uid in list(self._watch.waiting)[:_STARTED_AT_ONCE]:
                self._watch.waiting.pop(uid)
            await asyncio.gather(*(self._start(name) for name in names))

    async def _start(self, name: str) -> None:
        # It may be gone again.
        with suppress(RuntimeError):
            await self._api.say(name, _running(next_address()))


def _running(ip: str) -> Raw:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
    return {"phase": "Running", "conditions": conditions, "podIP": ip, "podIPs": [{"ip": ip}]}
