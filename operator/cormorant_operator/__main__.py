"""`python -m cormorant_operator --image IMAGE --key-file FILE` runs the operator.

Exit codes: 0 after SIGTERM or SIGINT, 1 after an error that a restart may fix, 2 for invalid arguments. Jobs keep
running without the operator.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from cormorant_contract.metrics import operator as declared
from cormorant_contract.metrics.labels import CONTENT_TYPE, Metric
from cormorant_operator.controller import Controller
from cormorant_operator.errors import OperatorError, SettingsError
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Job
from cormorant_operator.job_state import HEAD_STATES
from cormorant_operator.kube.client import KubeClient, RateLimiter
from cormorant_operator.kube.leader import Leader
from cormorant_operator.kube.watch import KINDS, QUEUE_KINDS, Kinds, Watch
from cormorant_operator.metrics import Values
from cormorant_operator.settings import Settings, read_settings

log = structlog.get_logger()
_OK, _FAILED, _REFUSED = 0, 1, 2
Event = MutableMapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an operator. Returns the exit code."""
    configure_logs()
    # Collect garbage rarely: scanning ten thousand cached pods is half the cost of a full list.
    gc.set_threshold(100_000, 50, 100)
    try:
        settings = read_settings(arguments)
        configure_logs(level=settings.log_level)
        return asyncio.run(_serve(settings))
    except SettingsError as error:
        log.critical("operator_refused", reason=str(error))
        return _REFUSED
    except OperatorError as error:
        log.critical("operator_failed", reason=str(error))
        return _FAILED


def configure_logs(*, level: str = "info") -> None:
    """Log this level and above to standard output, as JSON Lines."""

    def in_order(_logger: Any, _method: str, event: Event) -> Event:
        # As in heads and workers; null if unknown.
        first = ("timestamp", "level", "event", "job", "group", "worker", "epoch", "version")
        return {name: event.get(name) for name in first} | dict(event)

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            in_order,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
    )


async def _serve(settings: Settings) -> int:
    cluster = KubeClient(RateLimiter(rate=settings.requests_per_s, burst=settings.request_burst))
    heads = HeadClient(key=settings.key, url=settings.head_url, ca_file=settings.head_ca_file)
    controller = Controller(
        cluster,
        heads,
        key=settings.key,
        defaults=settings.defaults,
        namespaces=settings.namespaces,
        selector=settings.selector,
    )
    leader = None
    if settings.lease is not None:
        namespace, name = settings.lease
        leader = Leader(cluster, namespace=namespace, name=name, identity=settings.identity)
    probes = _make_probes(cluster, controller, is_leading=lambda: leader is None or leader.is_leading)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await probes.setup()
        try:
            await web.TCPSite(probes, port=settings.probe_port).start()
        except (OSError, OverflowError) as error:
            raise OperatorError(f"cannot listen on --probe-port {settings.probe_port}: {error}") from error
        return await _work(controller, leader, settings, stop)
    finally:
        await probes.cleanup()
        await heads.close()
        await cluster.close()


async def _work(controller: Controller, leader: Leader | None, settings: Settings, stop: asyncio.Event) -> int:
    """Lead, watch and reconcile until stopped, or until the lease is lost."""
    loop = asyncio.get_running_loop()

    def notice(raw: dict[str, Any], *, is_deleted: bool) -> None:
        loop.call_soon_threadsafe(partial(controller.notice, raw, is_deleted=is_deleted))

    def on_gap(namespace: str) -> None:
        loop.call_soon_threadsafe(controller.want_resync, namespace)

    def watch(kinds: Kinds) -> list[Watch]:
        return [
            Watch(notice, kinds=kinds, namespace=name, selector=settings.selector, on_gap=partial(on_gap, name))
            for name in settings.namespaces or ("",)
        ]

    watches, queue_watches = watch(KINDS), watch(QUEUE_KINDS)

    async def watch_workloads() -> None:
        await controller.has_workloads.wait()
        for one in queue_watches:
            one.start()
        await stop.wait()

    stopping = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Task[Any]] = [stopping]
    try:
        if leader is not None:
            acquiring = asyncio.create_task(leader.acquire())
            tasks.append(acquiring)
            await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return _OK
            acquiring.result()
            tasks.append(asyncio.create_task(leader.keep()))
            tasks.remove(acquiring)
        for one in watches:
            one.start()
        tasks.append(asyncio.create_task(controller.run()))
        tasks.append(asyncio.create_task(watch_workloads()))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return _OK
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if leader is not None:
            await leader.release()
        for one in (*watches, *queue_watches):
            one.ask_to_stop()
        await asyncio.gather(*(asyncio.to_thread(one.stop) for one in (*watches, *queue_watches)))


def _make_probes(cluster: KubeClient, controller: Controller, *, is_leading: Callable[[], bool]) -> web.AppRunner:
    """`/livez`, `/readyz` and `/metrics` of one operator, leading or not. They do not depend on the API server: a busy
    one must not restart operators.
    """

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        # A standby is ready.
        is_ready = controller.is_filled or not is_leading()
        return web.Response(status=200 if is_ready else 503, text="ok\n" if is_ready else "listing\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=controller.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def read() -> Mapping[Metric, Values]:
        uids, heads = controller.cache.jobs(), controller.head_states
        # Only the leader reports jobs: a standby's data would be outdated.
        found = [controller.cache.job(uid) for uid in uids] if is_leading() else []
        jobs = {(job.namespace, job.name): job.status for job in found if isinstance(job, Job)}
        return {
            declared.LEADER: {(): int(is_leading())},
            declared.JOBS: {(): len(uids)},
            declared.JOB_PHASE_METRIC: {(*who, status.phase): 1 for who, status in jobs.items()},
            declared.JOB_WORKER_RESTARTS: {
                who: sum(group.restarts for group in status.groups) for who, status in jobs.items()
            },
            declared.JOB_HEAD_RESTARTS: {who: status.head_restarts for who, status in jobs.items()},
            declared.HEADS: {(state,): heads[state] for state in HEAD_STATES},
            declared.QUEUE_DEPTH: {
                ("jobs",): controller.jobs_due.num_due,
                ("heads",): controller.heads_due.num_due,
                ("counters",): controller.counters_due.num_due,
            },
            declared.QUEUE_WAIT: {(): controller.jobs_due.longest_wait_s},
            declared.LOST_NAMESPACES: {(): len(controller.lost)},
            declared.API_REQUESTS: {
                (method, str(code)): count for (method, code), count in sorted(cluster.requests.items())
            },
        }

    controller.metrics.read = read
    app = web.Application()
    app.add_routes([web.get("/livez", live), web.get("/readyz", ready), web.get("/metrics", metrics)])
    return web.AppRunner(app, access_log=None)


if __name__ == "__main__":
    code = main()
    # kopf's thread may still hold a stream; everything else has finished.
    sys.stdout.flush()
    os._exit(code)
