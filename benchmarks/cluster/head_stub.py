"""Every head of a cluster, played by one process: `GET /NAMESPACE/JOB/v1/status` and `/v1/desired`.

It answers with the contract's own models, at every address of 127.0.0.0/8: a head has an address of its own, and keeps
its connection for 75 s.

    python -m benchmarks.cluster.head_stub          prints its port, ends when its standard input does
    POST /frames-per-second {"rate": 100}            rate of all frame counts; 0 stops them
    GET /frames                                      what all heads count now
    GET /asked                                       how many heads were asked since this was called last
"""

import asyncio
import sys
import time
from datetime import UTC, datetime

from aiohttp import web

from benchmarks.cluster.addresses import allow_many_connections
from cormorant_contract.rest.control import DesiredReport
from cormorant_contract.rest.status import EpisodeReport, FrameCounts, QueueReport, Status, WeightsReport


class Heads:
    """What they say and were told."""

    def __init__(self) -> None:
        self._began, self._rate, self._before = time.monotonic(), 0.0, 1000
        self._sizes: dict[str, dict[str, int]] = {}
        self._asked: set[str] = set()

    @property
    def frames(self) -> int:
        return self._before + int((time.monotonic() - self._began) * self._rate)

    async def set_rate(self, request: web.Request) -> web.Response:
        self._before, self._began = self.frames, time.monotonic()
        self._rate = float((await request.json())["rate"])
        return web.Response()

    async def counted(self, _: web.Request) -> web.Response:
        return web.json_response({"frames": self.frames, "rate": self._rate})

    async def asked(self, _: web.Request) -> web.Response:
        count = len(self._asked)
        self._asked.clear()
        return web.json_response({"heads": count})

    async def desired(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        if request.method == "PUT":
            self._sizes[job] = {**self._sizes.get(job, {}), **(await request.json())["groups"]}
        return web.json_response(text=self._desired(job).model_dump_json())

    def _desired(self, job: str) -> DesiredReport:
        return DesiredReport(groups=self._sizes.get(job, {"cpu": 1}), paused=False, pending=False)

    async def status(self, request: web.Request) -> web.Response:
        frames = self.frames
        self._asked.add(request.match_info["job"])
        report = Status(
            job=request.match_info["job"],
            namespace=request.match_info["namespace"],
            epoch="1",
            phase="Running",
            conditions=(),
            frames=FrameCounts(
                collected=frames, target=None, per_second=self._rate, stepped=frames, delivered=frames, dropped={}
            ),
            episodes=EpisodeReport(count=0, mean_return=None, mean_length=None),
            weights=WeightsReport(version=1, min_applied_version=1),
            groups=(),
            restarts=0,
            pause_state="running",
            pauses=(),
            queue=QueueReport(capacity=16, waiting=0, ready=0, lent=0, acked=0, redelivered=0, ended=False),
            consumers=(),
            data_port=8001,
            started_at=datetime.now(UTC),
            desired=self._desired(request.match_info["job"]),
        )
        return web.json_response(text=report.model_dump_json())


async def serve() -> None:
    allow_many_connections()
    heads = Heads()
    app = web.Application()
    prefix = "/{namespace}/{job}/v1"
    app.add_routes(
        [
            web.post("/frames-per-second", heads.set_rate),
            web.get("/frames", heads.counted),
            web.get("/asked", heads.asked),
            web.get(f"{prefix}/status", heads.status),
            web.get(f"{prefix}/desired", heads.desired),
            web.put(f"{prefix}/desired", heads.desired),
        ]
    )
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    try:
        # Its parent has ended, or wants it to end.
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
