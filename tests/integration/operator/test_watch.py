"""kopf's streams against a server that breaks them: what may have been missed is reported."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cormorant_contract.job import GROUP, VERSION
from cormorant_contract.schema import PLURAL
from cormorant_operator.kube.watch import Watch
from cormorant_testing.api_proxy import HttpThread, write_kubeconfig

JOBS = {(GROUP, VERSION, PLURAL): "CollectorJob"}
JOB = {"metadata": {"name": "pong", "namespace": "a", "uid": "u", "resourceVersion": "7"}}


def resource(plural: str, kind: str, *, namespaced: bool) -> dict[str, Any]:
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": ["list", "watch"]}


DISCOVERY = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [resource("namespaces", "Namespace", namespaced=False)]},
    "/apis": {
        "groups": [{"name": GROUP, "versions": [{"version": VERSION}], "preferredVersion": {"version": VERSION}}]
    },
    f"/apis/{GROUP}/{VERSION}": {"resources": [resource(PLURAL, "CollectorJob", namespaced=True)]},
}
EXPIRED = {"kind": "Status", "reason": "Expired", "code": 410}


class Streams(HttpThread):
    """Lists one job; its first stream ends so, and others stay open. Use as a context manager."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self._end, self.lists = end, threading.Semaphore(0)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if request.query.get("watch") is None:
            self.lists.release()
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": [JOB]})
        end, self._end = self._end, ""
        if end == "refused":
            return web.json_response(EXPIRED, status=410)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        if end == "expired":
            await stream.write(json.dumps({"type": "ERROR", "object": EXPIRED}).encode() + b"\n")
        else:
            await self._over.wait()
        return stream


@pytest.mark.parametrize("end", ["expired", "refused"])
def test_a_version_that_is_too_old_is_a_gap(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = threading.Semaphore(0)
    with Streams(end) as streams:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", streams.url)))
        watch = Watch(lambda *_, **__: None, kinds=JOBS, on_gap=gaps.release)
        watch.start()
        try:
            for _ in range(2):
                assert streams.lists.acquire(timeout=60), "kopf goes on without its stream"
            assert gaps.acquire(timeout=60)
        finally:
            watch.stop()
