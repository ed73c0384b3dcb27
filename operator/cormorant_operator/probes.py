"""`/livez`, `/readyz` and `/metrics` of the operator itself. Neither probe depends on the API server: a busy one must
not have its operators restarted.
"""

from collections.abc import Callable, Iterator, Mapping

from aiohttp import web

from cormorant_operator.cluster import Cluster
from cormorant_operator.controller import Controller


class Probes:
    """The HTTP server of one operator, leading or not."""

    def __init__(self, cluster: Cluster, controller: Controller, *, is_leading: Callable[[], bool]) -> None:
        """Listen to nothing yet."""
        self._cluster, self._controller, self._is_leading = cluster, controller, is_leading
        app = web.Application()
        app.add_routes(
            [web.get("/livez", self._live), web.get("/readyz", self._ready), web.get("/metrics", self._metrics)]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, *, port: int) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, port=port).start()

    async def close(self) -> None:
        """Listen no more."""
        await self._runner.cleanup()

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        # One that waits for the lease is ready for it.
        is_ready = self._controller.is_filled or not self._is_leading()
        return web.Response(status=200 if is_ready else 503, text="ok\n" if is_ready else "listing\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="".join(self._lines()), headers={"Content-Type": "text/plain; version=0.0.4"})

    def _lines(self) -> Iterator[str]:
        controller = self._controller
        yield from _metric("leader", "gauge", "Whether this operator leads.", {"": int(self._is_leading())})
        yield from _metric("jobs", "gauge", "Jobs that exist.", {"": len(controller.cache.jobs())})
        yield from _metric("reconcile_total", "counter", "Decisions about a job.", {"": controller.reconciles})
        yield from _metric(
            "reconcile_failures_total", "counter", "Decisions that could not be carried out.", {"": controller.failures}
        )
        yield from _metric(
            "workqueue_longest_wait_seconds",
            "gauge",
            "How late a job was looked at, at most.",
            {"": controller.jobs_due.longest_wait_s},
        )
        counts = {f'{{method="{m}",code="{c}"}}': n for (m, c), n in sorted(self._cluster.requests.items())}
        yield from _metric("api_requests_total", "counter", "Answers of the API server.", counts)


def _metric(name: str, kind: str, words: str, values: Mapping[str, float]) -> Iterator[str]:
    name = f"cormorant_operator_{name}"
    yield f"# HELP {name} {words}\n# TYPE {name} {kind}\n"
    for labels, value in values.items():
        yield f"{name}{labels} {value}\n"
