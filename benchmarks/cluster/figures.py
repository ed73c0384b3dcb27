"""The measurements, one a function: each gives rows with a target and whether it is met."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.cluster.api import Api, PodWatch, until
from benchmarks.cluster.jobs import manifest
from benchmarks.cluster.process import Load, Operator, frames_now, heads_asked, move_heads
from cormorant_operator.settings import COUNTERS_SHARE, REQUESTS_PER_S

STATUS = ("collectorjobs", "status")
_OWN = {
    ("pods", "", "POST"),
    *((kind, "", verb) for kind in ("services", "configmaps") for verb in ("APPLY", "GET")),
    ("secrets", "", "POST"),
    ("events", "", "POST"),
    (*STATUS, "APPLY"),
}
"""Requests of the operator that hardly anybody else sends: creations, dry runs among them, and status writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row."""

    what: str
    value: float
    unit: str
    target: float | None = None
    """At most; None: there is none."""
    details: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the value is as it should be."""
        return self.target is None or self.value <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every measurement works with."""

    api: Api
    pods: PodWatch
    operator: Operator
    head_port: int
    namespace: str
    settle_s: float
    """For a measurement's jobs to be ready, at most."""
    is_played: bool
    """The benchmark writes the pods' statuses."""

    def manifest(self, number: int, *, workers: int) -> dict[str, Any]:
        return manifest(number, namespace=self.namespace, workers=workers, is_played=self.is_played)

    async def submit(self, numbers: range, *, workers: int) -> float:
        """Make jobs and wait until every pod of them is there and every job runs. Returns the seconds."""
        names = {self.manifest(number, workers=workers)["metadata"]["name"] for number in numbers}
        began = time.monotonic()
        for number in numbers:
            await self.api.create_job(self.manifest(number, workers=workers))
        await until(lambda: self.is_running(names), what=f"{len(names)} jobs run", within_s=self.settle_s)
        return time.monotonic() - began

    async def clear(self) -> None:
        """Delete every job, and wait until their pods are gone."""
        for job in await self.api.jobs():
            await self.api.delete_job(job["metadata"]["name"])
        await self.pods.until(lambda: not self.pods.pods, what="all pods are gone", within_s=self.settle_s)

    async def is_running(self, names: set[str]) -> bool:
        """Whether these jobs are there, and every one runs."""
        await asyncio.to_thread(self.operator.check)
        jobs = [job for job in await self.api.jobs() if job["metadata"]["name"] in names]
        return len(jobs) == len(names) and all((job.get("status") or {}).get("phase") == "Running" for job in jobs)


async def creation(bench: Bench, *, workers: int, rounds: int) -> list[Figure]:
    """A job of many workers is applied: when are all its pods there, and what was the API server asked?"""
    took, shares, own_shares = [], [], []
    for number in range(rounds):
        await asyncio.sleep(3)  # the operator's budget of requests is full again
        before, asked = await bench.api.requests(), bench.operator.metric("api_requests_total")
        job = bench.manifest(number, workers=workers)
        name = job["metadata"]["name"]
        began = time.monotonic()
        await bench.api.create_job(job)
        await bench.pods.until(
            lambda name=name: len(bench.pods.of(name)) == workers + 1, what=f"{workers} workers are made", within_s=120
        )
        took.append(max(pod.created_at for pod in bench.pods.of(name)) - began)
        await until(lambda name=name: bench.is_running({name}), what=f"{name} runs", within_s=bench.settle_s)
        counted = await bench.api.requests() - before
        shares.append(sum(count for key, count in counted.items() if key in _OWN) / workers)
        own_shares.append((bench.operator.metric("api_requests_total") - asked) / workers)
        await bench.clear()
    words = f"of {rounds} times {workers} workers, from its manifest to every pod ready"
    return [
        Figure(
            what=f"apply, to all pods of a {workers}-worker job created",
            value=median(took),
            unit="s",
            target=10,
            details=f"median of {rounds}; most {max(took):.2f} s",
        ),
        Figure(
            what="API requests per worker created",
            value=median(shares),
            unit="requests",
            target=3,
            details=f"{words}; by the API server's metrics; {median(own_shares):.2f} by the operator's own",
        ),
    ]


async def standing(bench: Bench, *, jobs: int, workers: int, samples: int, window_s: float) -> list[Figure]:
    """Many running jobs, at the chart's defaults: what do they cost without new frames, and while all counts change?"""
    # How quickly they come about is the API server's business here, and no figure.
    bench.operator.restart("--api-qps", "1000", "--api-burst", "1000")
    settled_s = await bench.submit(range(jobs), workers=workers)
    bench.operator.restart()
    await until(_is_ready(bench), what="the operator has listed everything", within_s=bench.settle_s)
    await asyncio.sleep(min(60.0, window_s))  # what is left of the beginning
    size = f"{jobs} jobs, {len(bench.pods.pods)} pods, set up in {settled_s:.0f} s"
    still = await _weigh(bench, window_s)
    move_heads(bench.head_port, rate=1000)
    # Until every count was written once, and the next time as its turn comes.
    await asyncio.sleep(15 + 2 * jobs / (COUNTERS_SHARE * REQUESTS_PER_S))
    asked, writes = await _requests(bench)
    began = time.monotonic()
    moving, latencies, ages = await asyncio.gather(
        _weigh(bench, window_s), _replace(bench, samples=samples, window_s=window_s), _ages(bench, window_s)
    )
    took_s = time.monotonic() - began
    asked_then, writes_then = await _requests(bench)
    move_heads(bench.head_port, rate=0)
    load = f"load average {os.getloadavg()[0]:.1f}"
    words = f"{samples} times, all {jobs} jobs collect; p50 {median(latencies):.2f} s, most {max(latencies):.2f} s"
    return [
        Figure(
            what="memory", value=max(still.highest_rss_mb, moving.highest_rss_mb), unit="MB", target=300, details=size
        ),
        Figure(what="CPU, nothing changes", value=still.percent_of_a_core, unit="% of a core", target=5, details=load),
        Figure(what="CPU, all frame counts move", value=moving.percent_of_a_core, unit="% of a core"),
        Figure(
            what="worker deleted, to its replacement created, p95",
            value=_p95(latencies),
            unit="s",
            target=2,
            details=words,
        ),
        Figure(
            what="age of status.frames, most",
            value=max(ages),
            unit="s",
            target=30 if jobs <= 1000 else None,
            details=f"p95 {_p95(ages):.1f} s",
        ),
        Figure(what="requests to the API server", value=(asked_then - asked) / took_s, unit="a second", target=50),
        Figure(what="of them patches, statuses above all", value=(writes_then - writes) / took_s, unit="a second"),
    ]


async def _replace(bench: Bench, *, samples: int, window_s: float) -> list[float]:
    """Workers' pods are deleted, one after the other: seconds until each successor is there."""
    latencies = []
    for _ in range(samples):
        began = time.monotonic()
        victim_uid, victim = random.choice([(u, p) for u, p in bench.pods.pods.items() if p.slot != "head"])
        known = frozenset(bench.pods.in_slot(victim.job, victim.slot))
        await bench.api.delete_pod(victim.name)

        def successors(
            job: str = victim.job, slot: str = victim.slot, known: frozenset[str] = frozenset(known)
        ) -> set[str]:
            return bench.pods.in_slot(job, slot).keys() - known

        await bench.pods.until(successors, what=f"{victim.name} is replaced", within_s=120)
        latencies.append(min(bench.pods.pods[uid].created_at for uid in successors()) - began)
        await bench.pods.until(lambda uid=victim_uid: uid not in bench.pods.pods, what="it is gone", within_s=120)
        await asyncio.sleep(max(0.0, window_s / samples - (time.monotonic() - began)))
    return latencies


async def _ages(bench: Bench, window_s: float) -> list[float]:
    """Age of the counts in the statuses."""
    ages: list[float] = []
    until_s = time.monotonic() + window_s
    while time.monotonic() < until_s:
        await asyncio.sleep(window_s / 6)
        now = await asyncio.to_thread(frames_now, bench.head_port)
        ages += [now.age_s(int(job["status"]["frames"]["collected"])) for job in await bench.api.jobs()]
    return ages


async def _requests(bench: Bench) -> tuple[float, float]:
    """All requests of the operator so far, and its patches."""
    metric = "api_requests_total"
    return (
        await asyncio.to_thread(bench.operator.metric, metric),
        await asyncio.to_thread(bench.operator.metric, metric, 'method="PATCH"'),
    )


def _is_ready(bench: Bench) -> Callable[[], Awaitable[bool]]:
    async def is_ready() -> bool:
        return await asyncio.to_thread(bench.operator.is_ready)

    return is_ready


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]


async def restart(bench: Bench, *, jobs: int, watch_s: float) -> list[Figure]:
    """The operator is killed and restarted beside running jobs."""
    before = Counter(created=bench.pods.created, deleted=bench.pods.deleted)
    heads_asked(bench.head_port)
    asked = 0

    async def is_settled() -> bool:
        nonlocal asked
        asked += heads_asked(bench.head_port)
        return bench.operator.is_ready() and (
            bench.operator.metric("reconcile_duration_seconds_count", 'handler="reconcile"') >= jobs and asked >= jobs
        )

    began = time.monotonic()
    bench.operator.restart()
    await until(is_settled, what="every job was decided about and every head asked", within_s=bench.settle_s)
    took_s = time.monotonic() - began
    await asyncio.sleep(watch_s)
    created, deleted = bench.pods.created - before["created"], bench.pods.deleted - before["deleted"]
    words = f"every one of {jobs} jobs decided about and every head asked"
    return [
        Figure(what="restart of the operator, to settled", value=took_s, unit="s", target=60, details=words),
        Figure(what="pods created or deleted by that", value=created + deleted, unit="pods", target=0),
    ]


async def _weigh(bench: Bench, seconds: float) -> Load:
    return await asyncio.to_thread(bench.operator.weigh, seconds)
