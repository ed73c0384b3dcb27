"""`/livez`, `/readyz` and `/metrics` of the operator. The probes do not depend on the API server: a busy API server
must not restart operators.
"""

from collections.abc import Callable, Mapping

from aiohttp import web

from cormorant_contract.metrics import operator as declared
from cormorant_contract.metrics.metric import Metric
from cormorant_operator.controller import Controller
from cormorant_operator.job import Job
from cormorant_operator.job_state import HEAD_STATES
from cormorant_operator.kube.client import KubeClient
from cormorant_operator.metrics import Values


class Probes:
    """The HTTP server of one operator, leading or not."""

    def __init__(self, cluster: KubeClient, controller: Controller, *, is_leading: Callable[[], bool]) -> None:
        self._api, self._controller, self._is_leading = cluster, controller, is_leading
        controller.metrics.read = self._read
        app = web.Application()
        app.add_routes(
            [web.get("/livez", self._live), web.get("/readyz", self._ready), web.get("/metrics", self._metrics)]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, *, port: int) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, port=port).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        # A standby is ready.
        is_ready = self._controller.is_filled or not self._is_leading()
        return web.Response(status=200 if is_ready else 503, text="ok\n" if is_ready else "listing\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._controller.metrics.text(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _read(self) -> Mapping[Metric, Values]:
        controller = self._controller
        uids, heads = controller.cache.jobs(), controller.head_states
        # Only the leader reports jobs: a standby's data would be outdated.
        found = [controller.cache.job(uid) for uid in uids] if self._is_leading() else []
        jobs = {(job.namespace, job.name): job.status for job in found if isinstance(job, Job)}
        return {
            declared.LEADER: {(): int(self._is_leading())},
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
                (method, str(code)): count for (method, code), count in sorted(self._api.requests.items())
            },
        }
