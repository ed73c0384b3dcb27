"""What a job that changes nothing costs the operator: CPU time a poll, a resync, and bytes a job, offline.

The operator's own controller, cache, `reconcile`, executor and head client run in this process, heads in another. There
is no API server: its objects are JSON in memory, parsed each time that they are read, and kopf does not run.
`python -m benchmarks.cluster` measures the whole on a real one.

    python -m benchmarks.cluster.upkeep --jobs 1000 --workers 9 [--moving] [--profile]
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import psutil
import structlog

from benchmarks.cluster.addresses import allow_many_connections, next_address
from benchmarks.cluster.jobs import manifest
from benchmarks.cluster.process import move_heads, stub_heads
from cormorant_operator.controller import Controller
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.errors import KubeNotFound
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Job
from cormorant_operator.job_state import JobState
from cormorant_operator.kube.client import KubeClient
from cormorant_operator.settings import OperatorDefaults

Raw = dict[str, Any]
ROUNDS = 5
PAGE = 500
GAP_S = 0.01
"""Between two polls: together they cost less, and are not so in a cluster."""
QUIET_S = 0.002
"""CPU seconds in a tenth of a second below which the operator is quiet."""


class Objects:
    """What the API server would keep: the verbs of `cluster.KubeClient`, without HTTP. Pods are ready at once."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str, str, str], bytes] = {}
        self._version = 0
        self.written: Counter[str] = Counter()

    async def get(self, kind: str, *, namespace: str, name: str) -> Raw:
        try:
            return dict(json.loads(self._stored[kind, namespace, name]))
        except KeyError:
            raise KubeNotFound(404, {"message": f"{kind} {name} is not there"}, request="GET") from None

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> Raw:
        if is_dry_run or manifest["kind"] in ("Event", "Secret"):
            return dict(manifest)
        return self._store(manifest, before={})

    async def apply(self, manifest: Mapping[str, Any]) -> Raw:
        return self._store(manifest, before={})

    async def apply_status(self, manifest: Mapping[str, Any]) -> Raw:
        metadata = manifest["metadata"]
        before = await self.get(manifest["kind"], namespace=metadata["namespace"], name=metadata["name"])
        return self._store({**before, "status": manifest["status"]}, before=before)

    async def list(self, kind: str, *, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[list[Raw], str]]:
        label = selector.partition("=")[0].encode()
        texts = [text for (stored, _, _), text in self._stored.items() if stored == kind and label in text]
        for first in range(0, len(texts) or 1, PAGE):
            yield [json.loads(text) for text in texts[first : first + PAGE]], str(self._version)

    def _store(self, manifest: Mapping[str, Any], *, before: Mapping[str, Any]) -> Raw:
        self._version += 1
        kind, metadata = manifest["kind"], manifest["metadata"]
        name = metadata["name"]
        self.written[kind] += 1
        stored = {
            **manifest,
            "metadata": {
                "uid": f"uid-of-{kind}-{name}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "generation": 1,
                **metadata,
                "resourceVersion": str(self._version),
            },
        }
        if kind == "Pod":
            stored["status"] = _ready(name)
        self._stored[kind, metadata["namespace"], name] = json.dumps(stored).encode()
        return stored


def _ready(name: str) -> Raw:
    """A ready pod as large as a kubelet makes it."""
    since = "2026-01-01T00:00:00Z"
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    container = {
        "name": "worker",
        "image": "example/cormorant:1",
        "imageID": "example/cormorant@sha256:" + "0" * 64,
        "containerID": "containerd://" + "0" * 64,
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": since}},
    }
    return {
        "phase": "Running",
        "podIP": next_address(),
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": since} for kind in kinds],
        "containerStatuses": [container],
    }


class Upkeep:
    """One controller and its world."""

    def __init__(self, *, jobs: int, workers: int, port: int) -> None:
        self.objects, self._jobs, self._workers = Objects(), jobs, workers
        self._heads = HeadClient(key=b"k" * 64, url=f"http://{{ip}}:{port}/{{namespace}}/{{job}}")
        # What is measured is started by hand: no head is polled by the clock.
        self._defaults = OperatorDefaults(image="example/cormorant:1", poll_s=1e6, counters_interval_s=0.0)
        cluster: Any = self.objects
        assert all(hasattr(KubeClient, verb) for verb in ("get", "create", "apply", "apply_status", "list"))
        self.controller = Controller(cluster, self._heads, key=b"k" * 64, defaults=self._defaults)

    async def settle(self) -> None:
        """Bring every job about."""
        for number in range(self._jobs):
            await self.objects.create(manifest(number, namespace="bench", workers=self._workers))
        self._task = asyncio.create_task(self.controller.run())
        wanted = self._jobs * (self._workers + 1)
        while self.objects.written["Pod"] < wanted:
            await self._rest()
        for _ in range(2):  # the head's first answer, and what it was told
            await self.poll()

    async def poll(self) -> None:
        """Ask every head once, one after the other as in a cluster, and reconcile."""
        for number, uid in enumerate(self.controller.cache.jobs()):
            self.controller.heads_due.add(uid, after_s=number * GAP_S)
        await asyncio.sleep(self._jobs * GAP_S)
        await self._rest()

    async def resync(self) -> None:
        """List everything, and reconcile."""
        await self.controller.resync()
        await self._rest()

    def reconcile_s(self) -> float:
        """CPU time of one decision, and of gathering what it needs."""
        uid = self.controller.cache.jobs()[0]
        job = self.controller.cache.job(uid)
        assert isinstance(job, Job)
        began = time.process_time()
        record, state = self.controller.cache.record(uid), JobState(has_tokens=True)
        reconcile(job, record, state, datetime.now(UTC), defaults=self._defaults)
        return time.process_time() - began

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._heads.close()

    async def _rest(self) -> None:
        """Wait until this process has nothing to do any more."""
        used_s, before_s = 1.0, time.process_time()
        while used_s > QUIET_S:
            assert not self._task.done(), self._task.exception()
            await asyncio.sleep(0.1)
            used_s, before_s = time.process_time() - before_s, time.process_time()


async def _measure(args: argparse.Namespace, port: int) -> None:
    bare = psutil.Process().memory_info().rss
    upkeep = Upkeep(jobs=args.jobs, workers=args.workers, port=port)
    await upkeep.settle()
    if args.moving:
        move_heads(port, rate=1000)
    before = upkeep.objects.written.copy()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    polls = [await _cpu_s(upkeep.poll()) / args.jobs for _ in range(ROUNDS)]
    resyncs = [await _cpu_s(upkeep.resync()) for _ in range(ROUNDS)]
    profile.disable()
    reconciles = [upkeep.reconcile_s() for _ in range(ROUNDS)]
    written = upkeep.objects.written - before
    memory = psutil.Process().memory_info().rss
    await upkeep.close()
    poll_s, resync_s = sorted(polls)[ROUNDS // 2], sorted(resyncs)[ROUNDS // 2]
    share = poll_s * args.jobs / 15 + resync_s / 3600
    figures = {
        "jobs": args.jobs,
        "pods": args.jobs * (args.workers + 1),
        "cpu_ms_per_poll": round(1e3 * poll_s, 3),
        "cpu_ms_per_reconcile": round(1e3 * sorted(reconciles)[ROUNDS // 2], 3),
        "cpu_s_per_resync": round(resync_s, 3),
        "percent_of_a_core_polled_each_15_s": round(100 * share, 2),
        "rss_mb": round(memory / 1e6, 1),
        "rss_mb_before": round(bare / 1e6, 1),
        "written": dict(written),
    }
    print(json.dumps(figures, indent=1))
    if args.profile:
        pstats.Stats(profile).sort_stats(args.sort).print_stats(45)


async def _cpu_s(work: Any) -> float:
    began = time.process_time()
    await work
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.upkeep", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=9, help="of each job; a head besides")
    parser.add_argument("--moving", action="store_true", help="frames are counted: each poll writes a status")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumtime"))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    allow_many_connections()
    with stub_heads() as port:
        asyncio.run(_measure(args, port))


if __name__ == "__main__":
    main()
