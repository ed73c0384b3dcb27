"""Where one operator's limit is, offline: jobs that all collect, at the chart's default budget of requests.

The operator's own controller, cache, executor, budget and head client run in this process, heads in another. The API
server is JSON in memory that answers after a few milliseconds, and kopf does not run: what gives first here is the
operator, not etcd. `python -m benchmarks.cluster` measures with a real API server.

    python -m benchmarks.cluster.knee --jobs 1000 2000 4000
"""

import argparse
import asyncio
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from statistics import quantiles
from typing import Any

import psutil
import structlog

from benchmarks.cluster.addresses import allow_many_connections
from benchmarks.cluster.jobs import manifest
from benchmarks.cluster.process import Counted, frames_now, move_heads, stub_heads
from benchmarks.cluster.upkeep import Objects, Raw
from cormorant_contract.children import INDEX, JOB
from cormorant_operator.controller import Controller
from cormorant_operator.errors import KubeConflict
from cormorant_operator.head_client import HeadClient
from cormorant_operator.kube.client import RateLimiter
from cormorant_operator.settings import BURST, COUNTERS_SHARE, REQUESTS_PER_S, OperatorDefaults

FRAMES_PER_SECOND = 1000.0
SAMPLE_S = 1.0
"""Between two replaced workers, and between two looks at all statuses."""
REPLACED_WITHIN_S = 120.0


class PacedObjects(Objects):
    """Objects behind the operator's budget of requests, and a server that takes its time."""

    def __init__(self, *, latency_s: float) -> None:
        super().__init__()
        self.pace = RateLimiter(rate=1e6, burst=1_000_000)
        self._latency_s = latency_s
        self.requests: Counter[str] = Counter()
        self.refused = 0
        self.born: dict[str, asyncio.Future[float]] = {}
        """Pods that are waited for, by slot, as `JOB/INDEX`."""

    async def get(self, kind: str, *, namespace: str, name: str) -> Raw:
        await self._turn("GET")
        return await super().get(kind, namespace=namespace, name=name)

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> Raw:
        await self._turn("POST")
        made = await super().create(manifest, is_dry_run=is_dry_run)
        labels = manifest["metadata"].get("labels") or {}
        waiting = self.born.pop(f"{labels.get(JOB)}/{labels.get(INDEX)}", None)
        if manifest["kind"] == "Pod" and not is_dry_run and waiting is not None and not waiting.done():
            waiting.set_result(time.monotonic())
        return made

    async def apply(self, manifest: Mapping[str, Any]) -> Raw:
        await self._turn("APPLY")
        return await super().apply(manifest)

    async def apply_status(self, manifest: Mapping[str, Any]) -> Raw:
        await self._turn("STATUS")
        metadata = manifest["metadata"]
        before = await super().get(manifest["kind"], namespace=metadata["namespace"], name=metadata["name"])
        version = metadata.get("resourceVersion")
        if version not in (None, before["metadata"]["resourceVersion"]):
            self.refused += 1
            raise KubeConflict(409, {"message": "the object has been modified"}, request="PATCH")
        return self._store({**before, "status": manifest["status"]}, before=before)

    def read(self, kind: str) -> list[Raw]:
        """All of a kind, past the budget."""
        return [json.loads(text) for (stored, _, _), text in self._stored.items() if stored == kind]

    def sample(self, kind: str, *, most: int) -> list[Raw]:
        """Some of a kind, chosen by chance."""
        texts = [text for (stored, _, _), text in self._stored.items() if stored == kind]
        return [json.loads(text) for text in random.sample(texts, k=min(most, len(texts)))]

    def take_away(self, kind: str, name: str) -> Raw:
        """Delete an object, as a user would."""
        key = next(key for key in self._stored if key[0] == kind and key[2] == name)
        gone = dict(json.loads(self._stored.pop(key)))
        self._version += 1
        return {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}

    async def _turn(self, verb: str) -> None:
        await self.pace.wait()
        self.requests[verb] += 1
        await asyncio.sleep(self._latency_s)

    async def list(self, kind: str, *, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[list[Raw], str]]:
        await self._turn("LIST")
        async for page in super().list(kind, namespace=namespace, selector=selector):
            yield page


class Knee:
    """One number of jobs."""

    def __init__(self, *, jobs: int, workers: int, port: int, latency_s: float, qps: float) -> None:
        self.objects = PacedObjects(latency_s=latency_s)
        self._jobs, self._workers, self._port, self._qps = jobs, workers, port, qps
        self._heads = HeadClient(key=b"k" * 64, url=f"http://{{ip}}:{port}/{{namespace}}/{{job}}")
        cluster: Any = self.objects
        defaults = OperatorDefaults(image="example/cormorant:1", counters_per_s=COUNTERS_SHARE * qps)
        self._controller = Controller(cluster, self._heads, key=b"k" * 64, defaults=defaults)
        self._ages: list[float] = []
        self._replaced: list[float] = []
        self._missed = 0

    async def measure(self, *, window_s: float, within_s: float) -> dict[str, Any]:
        move_heads(self._port, rate=0)
        for number in range(self._jobs):
            await Objects.create(self.objects, manifest(number, namespace="bench", workers=self._workers))
        running = asyncio.create_task(self._controller.run())
        try:
            await self._settle(running, within_s=within_s)
            self.objects.pace = RateLimiter(rate=self._qps, burst=round(self._qps * BURST / REQUESTS_PER_S))
            await asyncio.sleep(15)  # what is left of the beginning
            began, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(window_s)
            still = (time.process_time() - used_s) / (time.monotonic() - began)
            move_heads(self._port, rate=FRAMES_PER_SECOND)
            # Every count was written once, and the next time as its turn comes.
            await asyncio.sleep(15 + 2 * self._jobs / (COUNTERS_SHARE * self._qps))
            return {"percent_of_a_core_still": round(100 * still, 1), **await self._watch(running, window_s)}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self._heads.close()

    async def _settle(self, running: "asyncio.Task[None]", *, within_s: float) -> None:
        until = time.monotonic() + within_s
        while True:
            if running.done():
                running.result()
            phases = Counter((job.get("status") or {}).get("phase") for job in self.objects.read("CollectorJob"))
            if phases["Running"] == self._jobs:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"not within {within_s:.0f} s: {self._jobs} jobs run; they are {dict(phases)}")
            await asyncio.sleep(1.0)

    async def _watch(self, running: "asyncio.Task[None]", window_s: float) -> dict[str, Any]:
        before, refused = self.objects.requests.copy(), self.objects.refused
        own_s = 0.0
        began, used_s = time.monotonic(), time.process_time()
        replacements: list[asyncio.Task[None]] = []
        while time.monotonic() - began < window_s:
            if running.done():
                running.result()
            at = time.process_time()
            replacements.append(asyncio.create_task(self._replace_one()))
            counted = await asyncio.to_thread(frames_now, self._port)
            self._note_ages(counted)
            own_s += time.process_time() - at
            await asyncio.sleep(SAMPLE_S)
        took_s, used_s = time.monotonic() - began, time.process_time() - used_s - own_s
        asked = self.objects.requests - before
        await asyncio.wait(replacements, timeout=REPLACED_WITHIN_S)
        for task in replacements:
            task.cancel()
        return {
            "jobs": self._jobs,
            "pods": self._jobs * (self._workers + 1),
            "requests_per_s": round(asked.total() / took_s, 1),
            "status_writes_per_s": round(asked["STATUS"] / took_s, 1),
            "status_writes_refused": self.objects.refused - refused,
            "status_age_s_p95": round(_p95(self._ages), 1),
            "status_age_s_most": round(max(self._ages), 1),
            "replaced": len(self._replaced),
            "not_replaced": len(replacements) - len(self._replaced),
            "replacement_s_p95": round(_p95(self._replaced), 2),
            "replacement_s_most": round(max(self._replaced, default=float("nan")), 2),
            "percent_of_a_core": round(100 * used_s / took_s, 1),
            "rss_mb": round(psutil.Process().memory_info().rss / 1e6),
        }

    def _note_ages(self, counted: Counted) -> None:
        """How old the counts of all jobs are, as a reader of the statuses finds them."""
        # A few only: to read all of them holds up the operator, which runs in the same process.
        for job in self.objects.sample("CollectorJob", most=50):
            self._ages.append(counted.age_s(int(job["status"]["frames"]["collected"])))

    async def _replace_one(self) -> None:
        """A worker's pod vanishes: when is its successor created?"""
        job, index = random.randrange(self._jobs), random.randrange(self._workers)
        place = f"bench-{job}/{index}"
        pods = self._controller.cache.record(f"uid-of-CollectorJob-bench-{job}").pods
        victim = next((pod for pod in pods if pod.role == "worker" and pod.index == index and pod.is_live), None)
        if victim is None or place in self.objects.born:
            return
        self.objects.born[place] = created = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        self._controller.notice(self.objects.take_away("Pod", victim.name), is_deleted=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLACED_WITHIN_S):
                self._replaced.append(await created - began)


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else float("nan")


async def _measure(args: argparse.Namespace, port: int) -> None:
    for jobs in args.jobs:
        knee = Knee(jobs=jobs, workers=args.workers, port=port, latency_s=args.latency_ms / 1e3, qps=args.qps)
        figures = await knee.measure(window_s=args.window_seconds, within_s=args.settle_seconds)
        print(json.dumps({**figures, "load_average": round(os.getloadavg()[0], 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.knee", description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--workers", type=int, default=9, help="workers of each job, besides its head")
    parser.add_argument("--qps", type=float, default=REQUESTS_PER_S, help="budget of requests a second")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of a request to the API server")
    parser.add_argument("--window-seconds", type=float, default=60.0, help="of the look at the load")
    parser.add_argument("--settle-seconds", type=float, default=600.0, help="for all jobs to run, at most")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    allow_many_connections()
    with stub_heads() as port:
        asyncio.run(_measure(args, port))


if __name__ == "__main__":
    main()
