"""`/v1/live`, the page's files, and pictures of environments, over a real head."""

import asyncio
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cormorant_api.live import moments as live_module
from cormorant_api.live.moments import Recorder
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_cli import __main__ as command_line
from cormorant_client import connect
from cormorant_testing.browser import chromium, watching
from cormorant_testing.collecting import make_job
from cormorant_testing.heads import HeadProcess
from cormorant_testing.scripts import until
from cormorant_testing.serving import Api, Reply, Served, serve, weights_file
from cormorant_testing.vectors import COUNTING
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions


def first(frames: Iterator[tuple[str, str, str]], kind: str, what: Any = lambda _: True) -> Any:
    """The first frame of a kind of which something is true; twenty may come before it."""
    for found, _, text in islice(frames, 20):
        if found == kind and what(data := json.loads(text)):
            return data
    raise AssertionError(f"no {kind} came")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A job whose observations are pictures, over weights that name their version in every action."""
    job = make_job(
        num_envs=4, policy="versioned", action="box", observation="image", lengths=(3, 8), step_s=0.002,
        queue={"capacityBatches": 4, "onFull": "drop_oldest"},
    )  # fmt: skip
    with serve(job, directory=tmp_path_factory.mktemp("head"), workers=2) as served:
        yield served


def test_a_listener_hears_what_the_api_says(watched: Served) -> None:
    with watched.reader.listen("/v1/live") as frames:
        assert first(frames, "hello") == {"role": "read"}
        opening = first(frames, "opening")
        assert (opening["num_envs"], opening["picture"]) == (4, True)
        history = opening["history"]
        assert len(history["at"]) == len(history["per_second"]) == len(history["mean_return"])
        status = watched.status
        told = opening["moment"]["status"]
        for name in ("job", "epoch", "started_at", "data_port"):
            assert told[name] == status[name]
        assert [w["id"] for w in opening["moment"]["workers"]] == ["cpu-0", "cpu-1"]
        version = watched.writer.put("/v1/models/policy/weights", weights_file(3)).json["version"]
        moment = first(frames, "moment", lambda data: data["status"]["weights"]["version"] == version)
        assert moment["updates"][0]["update_id"] == f"u{version}"
        lease = watched.writer.post("/v1/pauses", {"owner": "one", "wait_seconds": 0}).headers["location"]
        paused = first(frames, "moment", lambda data: data["status"]["phase"] == "Paused")
        assert (paused["status"]["pauses"][0]["owner"], paused["spec_paused"]) == ("one", False)
        watched.writer.delete(lease)
        first(frames, "moment", lambda data: data["status"]["phase"] == "Running")
    # What happened is in one of the moments, and in the opening of the next listener.
    with watched.reader.listen("/v1/live") as frames:
        kinds = [event["kind"] for event in first(frames, "opening")["moment"]["events"]]
        assert {"published", "paused", "resumed"} <= set(kinds)
        assert not {"accepted", "applied"} & set(kinds)


def test_a_moment_is_put_into_words_once_a_second_for_all(watched: Served) -> None:
    live = watched.server.head.watchers[0].__self__  # type: ignore[attr-defined]  # the bound method of a Live
    until(lambda: live.listeners == 0)
    before = live.end
    time.sleep(1.6)
    assert live.end == before, "nobody listens"

    def listen(_: int) -> list[str]:
        with watched.reader.listen("/v1/live") as frames:
            first(frames, "opening")
            return [json.dumps(first(frames, "moment")) for _ in range(2)]

    with ThreadPoolExecutor(12) as pool:
        heard = {text for texts in pool.map(listen, range(12)) for text in texts}
    assert len(heard) <= live.end - before < 24, "one for all of them"
    with watched.reader.listen("/v1/live") as frames:
        first(frames, "opening")
        before = live.end
        for _ in range(50):
            live.observe(watched.fleet.stats())
        assert live.end - before < 25, "one a second, however often it is told"
    until(lambda: live.listeners == 0)


def test_a_recorder_does_not_pause_the_run_of_a_paused_manifest(tmp_path: Path) -> None:
    job = make_job(num_envs=1, lengths=4, dataset=f"file://{tmp_path}/data")
    paused = job.model_copy(update={"spec": job.spec.model_copy(update={"paused": True})})
    since = time.time() - 60
    with WorkerFleet(paused, FleetOptions(workers=1)) as fleet, Recorder(paused, fleet, since=since) as recorder:
        assert not recorder.head.running.pauses.wants_pause
        until(lambda: fleet.stats().frames > 0)
    assert (recorder.head.end_state, fleet.stats().paused) == ("Stopped", False)
    history = recorder.moments.now(fleet.stats()).history
    assert history.at[0] == round(since, 1), "the report's mean counts from the begin of the run"
    assert history.per_second[0] <= fleet.stats().stepped_frames / 60


def test_head_without_tokens_refuses_other_pages_changes(tmp_path: Path) -> None:
    with HeadServer(make_job(), HeadSettings(port=0, directory=tmp_path, has_tokens=False)) as server:
        api = Served(server).anonymous
        own, other = {"Origin": f"http://127.0.0.1:{api.port}"}, {"Origin": "https://example.org"}
        for method, path in (
            ("POST", "/v1/pause"), ("PUT", "/v1/weights"), ("GET", "/v1/batches/next"), ("GET", "/v1/state")
        ):  # fmt: skip
            refused = api.call(method, path, b"", **other)
            assert (refused.status, refused.kind) == (403, "forbidden")
            assert "comes from a page of another site (Origin https://example.org)" in refused.json["detail"]
            for others in ({"Sec_Fetch_Site": "cross-site"}, {**own, "Sec_Fetch_Site": "same-site"}):
                assert api.call(method, path, b"", **others).status == 403
            # Whoever passes hears what anybody hears before the first worker: a program, an address that was typed, an
            # old browser on our page, and a new one.
            for ours in ({}, {"Sec_Fetch_Site": "none"}, own, {**own, "Sec_Fetch_Site": "same-origin"}):
                assert api.call(method, path, b"", **ours).status != 403
            # A name of theirs that was made to lead here: their page would be of this site.
            assert api.call(method, path, b"", Host=f"rebound.example:{api.port}").status == 403
        assert api.call("GET", "/v1/status", Host=f"rebound.example:{api.port}").status == 403
        assert api.call("GET", "/v1/live", **other).kind == "no-workers", "its answer is not read by others' pages"


# -- the page's files ------------------------------------------------------------------------------------------


def test_the_page_needs_no_token_and_nothing_from_elsewhere(watched: Served) -> None:
    index = watched.anonymous.get("/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert watched.anonymous.call("HEAD", "/").status == 200
    assert watched.anonymous.get("/page/..%2Fapp.py").kind == "not-found"
    policy = dict(part.strip().split(" ", 1) for part in index.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    text = index.body.decode()
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert not [name for name in named if "//" in name or name.startswith("/")], "relative: a proxy may add a prefix"
    assert " style=" not in text
    assert "<style" not in text
    files = {path.name: path.read_text() for path in (Path(live_module.__file__).parent / "page").iterdir()}
    assert files.pop("index.html") == text
    used = {name for name in named if name.startswith("page/")}
    used |= {f"page/{part}" for source in files.values() for part in re.findall(r'from "\./([^"]+)"', source)}
    assert used == {f"page/{name}" for name in files}
    for name, source in files.items():
        found = watched.anonymous.get(f"/page/{name}")
        assert (found.body.decode(), found.headers["x-content-type-options"]) == (source, "nosniff"), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source), name
        again = watched.anonymous.get(f"/page/{name}", If_None_Match=found.headers["etag"])
        assert (again.status, again.body) == (304, b"")


# -- pictures --------------------------------------------------------------------------------------------------


def look(api: Api, worker: str, env: int) -> np.ndarray[Any, Any]:
    reply = api.get(f"/v1/workers/{worker}/picture?env={env}")
    assert (reply.status, reply.headers["content-type"], reply.headers["cache-control"]) == (
        200, "image/png", "no-store"
    )  # fmt: skip
    with Image.open(io.BytesIO(reply.body)) as image:
        return np.asarray(image)


@pytest.mark.parametrize(("worker", "env"), [("cpu-0", 0), ("cpu-1", 2)])
def test_pictures_are_the_environments_and_change_while_it_steps(watched: Served, worker: str, env: int) -> None:
    assert look(watched.reader, worker, env).shape == (6, 6)
    seen = set[int]()
    until(lambda: seen.add(int(look(watched.reader, worker, env).max())) or len(seen) > 1)
    watched.writer.post("/v1/pause", {"wait_seconds": 60})
    try:
        shown = look(watched.reader, worker, env)
        time.sleep(0.25)
        assert np.array_equal(look(watched.reader, worker, env), shown)
    finally:
        watched.writer.post("/v1/resume")


def test_previews_beyond_the_limit_are_refused(watched: Served) -> None:
    previews, ended = watched.server.head.previews, threading.Event()

    async def ask() -> Reply:
        asked = [asyncio.ensure_future(previews(ended.wait)) for _ in range(20)]
        await asyncio.sleep(0)  # they begin
        try:
            return await asyncio.to_thread(watched.reader.call, "GET", "/v1/workers/cpu-0/picture", timeout=10)
        finally:
            ended.set()
            await asyncio.gather(*asked)

    refused = asyncio.run(ask())
    assert (refused.status, refused.kind, refused.headers["retry-after"]) == (503, "overloaded", "1")
    assert "previews threads have 4 calls under way and 16 waiting, the limit; retry" in refused.json["detail"]
    assert look(watched.reader, "cpu-0", 0).shape == (6, 6), "there is room again"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_environments_of_an_actor_on_ray_are_shown(tmp_path: Path) -> None:
    job = make_job(num_envs=2, observation="image", queue={"onFull": "drop_oldest"}, lengths=(3, 8), step_s=0.002)
    with HeadProcess(job, tmp_path / "head", "--fleet", "ray") as head:
        api, seen = head.api("read"), set[bytes]()
        until(lambda: seen.add(look(api, "cpu-0", 1).tobytes()) or len(seen) >= 3)
        head.end()


def test_what_nobody_can_look_at_is_refused(watched: Served) -> None:
    assert watched.reader.get("/v1/workers/cpu-7/picture").kind == "unknown-worker"
    for env in ("4", "-1", "x"):
        assert watched.reader.get(f"/v1/workers/cpu-0/picture?env={env}").kind == "invalid-request"


# -- a browser -------------------------------------------------------------------------------------------------


def test_environments_that_keep_failing_are_not_green(tmp_path: Path) -> None:
    """Each life of the environment has 19 steps: a batch of 190 costs ten restarts. One batch fits the queue."""
    env = {"entrypoint": COUNTING, "vectorization": "inline", "maxRestarts": 10**6}
    env["kwargs"] = {"failures": [{"step": 20, "words": "no display"}], "lengths": 1000}
    queue = {"capacityBatches": 1, "onFull": "drop_oldest"}
    job = make_job(env={"gymnasium": env}, queue=queue, collection={"framesPerBatch": 190})
    words = (
        r"environments keep failing: [\d,]+ restarts in [\d,]+ s, [\d,]+ frames dropped; the first: environment 0 of "
        r"worker cpu-0 raised ValueError: no display\nTraceback \(most recent call last\):\n"
    )
    with serve(job, directory=tmp_path) as served:
        until(lambda: served.reader.condition("EnvironmentsFailing")["status"] == "True")
        failing = served.reader.condition("EnvironmentsFailing")
        assert failing["reason"] == "KeepFailing"
        assert re.match(words, failing["message"])
        with chromium() as browser, watching(browser, served.writer.port, served.writer.token) as page:
            page.wait_for_text("#phase", "Environments fail")
            page.wait_for_text("main #waiting", "environments keep failing: ")
            page.wait_for_text("main #traceback[tabindex]", "ValueError: no display")
            page.wait_for_text("#dropped", " dropped (drop oldest)")


def test_a_report_of_a_running_job_holds_what_the_page_shows(
    endless: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with connect(endless.server.url, token=endless.reader.token) as client:
        opening = client.opening()
    name = opening.moment.status.job
    command = ["report", "--url", endless.server.url, "--token", endless.reader.token]
    assert command_line.run(command) == 0
    assert capsys.readouterr().out == f"report: {name}-report.html\n"
    html = Path(f"{name}-report.html").read_text()
    (told,) = re.findall(r'<script type="application/json" id="report">(.*)</script>', html)
    report = json.loads(told)
    assert (report["state"], report["opening"]["moment"]["status"]["job"]) == ("", name)
    assert report["opening"]["moment"]["status"]["frames"]["collected"] >= opening.moment.status.frames.collected
