"""kopf's streams against a server that breaks them: what may have been missed is reported."""

import json
import threading
from collections.abc import Iterator
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
    """Lists one job; each stream ends as `ends` says, and stays open after that. Use as a context manager."""

    def __init__(self, *ends: str) -> None:
        super().__init__()
        self._ends = iter(ends)
        self.lists = threading.Semaphore(0)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if request.query.get("watch") is None:
            self.lists.release()
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": [JOB]})
        end = next(self._ends, "")
        if end == "refused":
            return web.json_response(EXPIRED, status=410)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        if end == "expired":
            await stream.write(json.dumps({"type": "ERROR", "object": EXPIRED}).encode() + b"\n")
        else:
            await self._over.wait()
        return stream


@pytest.fixture
def gaps(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Semaphore]:
    """Released at each gap that a watch reports. The server lists twice, after its first stream ended as given."""
    found = threading.Semaphore(0)
    with Streams(request.param) as streams:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", streams.url)))
        watch = Watch(lambda *_, **__: None, kinds=JOBS, on_gap=found.release)
        watch.start()
        try:
            assert streams.lists.acquire(timeout=60)
            assert streams.lists.acquire(timeout=60), "kopf goes on without its stream"
            yield found
        finally:
            watch.stop()


@pytest.mark.parametrize("gaps", ["expired", "refused"], indirect=True)
def test_a_version_that_is_too_old_is_a_gap(gaps: threading.Semaphore) -> None:
    assert gaps.acquire(timeout=60)
