"""The live page in a real browser, over a real head and a real CartPole, while heads are killed, stopped and replaced;
and its previews of observations.
"""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser

import cormorant
from cormorant.policies import mlp
from cormorant_api.live.moments import report_of
from cormorant_testing import browser as browser_module
from cormorant_testing.browser import Watching, chromium, watching
from cormorant_testing.collecting import make_job
from cormorant_testing.commands import Command
from cormorant_testing.heads import HeadProcess, write_manifest
from cormorant_testing.scripts import until, unused_port
from cormorant_testing.serving import Api, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AWAY = ("401", "503", "ERR_")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadProcess]:
    folder = tmp_path_factory.mktemp("cartpole")
    manifest = write_manifest(folder, "CartPole-v1", totalFrames=10**12)  # far from its end
    with HeadProcess(manifest, folder / "head", "--workers", "2") as head:
        head.api()
        yield head


@pytest.fixture(scope="module")
def writer(cartpole: HeadProcess) -> Api:
    return cartpole.api("write")


@contextmanager
def paused(api: Api, owner: str = "tests") -> Iterator[None]:
    api.post("/v1/pauses", {"owner": owner, "wait_seconds": 60})
    try:
        yield
    finally:
        api.post("/v1/resume", {"owner": owner})


def publish(api: Api) -> int:
    """Publish weights; returns their version."""
    with cormorant.connect(f"http://127.0.0.1:{api.port}", token=api.token) as fleet:
        return fleet.publish(mlp(*fleet.spaces), wait=60).version


@pytest.fixture
def board(writer: Api, browser: Browser) -> Iterator[Watching]:
    with watching(browser, writer.port, writer.token) as watched:
        yield watched


def test_it_shows_the_numbers_that_the_api_gives(writer: Api, board: Watching) -> None:
    until(lambda: writer.get("/v1/status").json["episodes"]["count"] > 20)
    with paused(writer):
        board.wait_for_text("#phase", "Paused")
        # Standing still: what the page shows from now on is what the API says now.
        status, workers = writer.get("/v1/status").json, writer.get("/v1/workers").json["workers"]
        board.wait_for_text("#frames", f"{status['frames']['collected']:,}")
        board.wait_for_text("#episodes", f"{status['episodes']['count']:,} episodes")
        assert board.text("#job") == "team-a/cartpole"
        assert board.text("#worker-count") == "2 of 2"
        assert board.text("#epoch") == status["epoch"]
        assert float(board.text("#return")) == pytest.approx(status["episodes"]["mean_return"], rel=0.005)
        assert board.text("#queue") == f"{min(status['queue']['waiting'], 4)} of 4"
        board.wait_for_text("#workers", "paused")
        rows = board.evaluate(
            "[...document.querySelectorAll('#workers tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        assert [(row[0], row[1], row[2], row[3], row[5]) for row in rows] == [
            (w["id"], w["phase"], str(w["version"]), str(w["lag"]), f"{w['frames']:,}") for w in workers
        ]
        assert "resumed" not in board.text("#events"), "the start is not a resume"
        # The rate runs out over its window of ten seconds.
        board.wait_for_text("#plot-fps output", ": 0 frames per second")


def test_tiles_show_metrics_variants_statistics_and_servers(tmp_path: Path, browser: Browser) -> None:
    groups = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": 1}]
    manifest = write_manifest(
        tmp_path,
        "CartPole-v1",
        episodeMetrics=[{"name": "longest", "key": "elapsed_step", "reduce": "max"}],
        normalize={"observation": {}, "reward": {}},
        env={"info": [{"key": "elapsed_step"}], "variants": [{"name": "short"}, {"name": "long"}]},
        spec={"workerGroups": groups, "inference": {"batchShapes": [8]}},
    )
    with HeadProcess(manifest, tmp_path / "head") as head:
        api = head.api("write")
        with watching(browser, api.port, api.token) as watched:
            until(lambda: len(api.get("/v1/status").json["episodes"]["tasks"]) == 2)
            watched.page.wait_for_function(
                "() => /^[\\d,]{3,} rows\\/s$/.test(document.getElementById('servers').textContent)"
            )
            pattern = r"act: [\d.]+ rows per act and \d+ % padding, wait [\d.]+ ms, act [\d.]+ ms, busy \d+ %"
            assert re.fullmatch(pattern, watched.text("#servers-detail"))
            with paused(api):
                watched.wait_for_text("#phase", "Paused")
                status = api.get("/v1/status").json
                watched.wait_for_text("#frames", f"{status['frames']['collected']:,}")
                assert watched.text("#frames-title") == "Frames collected"
                shown = re.fullmatch(r"longest ([\d.]+)", watched.text("#metrics"))
                assert shown
                assert float(shown[1]) == pytest.approx(status["episodes"]["metrics"]["longest"], rel=0.005)
                assert re.fullmatch(r"(short|long) [\d.]+, (?!\1)(short|long) [\d.]+", watched.text("#tasks"))
                found = status["statistics"]
                assert list(found) == ["observation", "next/reward"]
                watched.wait_for_text("#statistics", f"{found['observation']['frames']:,} frames")
                ranges = watched.text("#statistics-ranges")
                assert ranges.startswith("the policy acts with 0; observation: mean ")
                assert "; next/reward: mean " in ranges


def test_an_evaluation_counts_episodes(tmp_path: Path, browser: Browser) -> None:
    spec = {"output": {"dataset": {"uri": str(tmp_path / "results")}}}
    manifest = write_manifest(tmp_path, "CartPole-v1", episodes={"count": 4000}, spec=spec)
    with HeadProcess(manifest, tmp_path / "head") as head:
        api = head.api("write")
        with watching(browser, api.port, api.token) as watched:
            watched.wait_for_text("#frames-title", "Episodes played")
            watched.wait_for_text("#target", "of 4,000")
            watched.wait_for_text("#target", " left")
            status = api.get("/v1/status").json
            frames, length = status["frames"], status["episodes"]["mean_length"]
            left = re.search(r"about (\d+) (s|min) left", watched.text("#target"))
            assert left
            seconds = (frames["target"] - frames["collected"]) * length / frames["per_second"]
            assert int(left[1]) * {"s": 1, "min": 60}[left[2]] > seconds / 3, "episodes left are not frames left"
            assert watched.evaluate("document.getElementById('statistics-tile').hidden") is True


def test_it_pauses_a_real_job_and_lets_it_go_on(writer: Api, browser: Browser) -> None:
    with watching(browser, writer.port, writer.token) as watched, watching(browser, writer.port, writer.token) as other:
        watched.page.get_by_role("button", name="Pause", exact=True).click()
        until(lambda: writer.get("/v1/pauses").json["state"] == "paused")
        (lease,) = writer.get("/v1/pauses").json["leases"]
        assert (lease["owner"], lease["reason"]) == ("page", "from the live page")
        watched.wait_for_text("#phase", "Paused")
        watched.wait_for_text("#leases", "Paused by page until")
        stepped = writer.get("/v1/status").json["frames"]["stepped"]
        time.sleep(1)
        assert writer.get("/v1/status").json["frames"]["stepped"] == stepped
        # Another person's page ends it.
        other.page.get_by_role("button", name="Resume", exact=True).click()
        until(lambda: writer.get("/v1/status").json["frames"]["stepped"] > stepped)
        watched.wait_for_text("#phase", "Running")
        watched.wait_for_text("#events", "resumed")
        # Somebody else's lease has a button of its own, and is text whatever it says.
        writer.post("/v1/pauses", {"owner": "evaluation", "reason": "<img src=x onerror=alert(1)>", "wait_seconds": 0})
        watched.wait_for_text("#leases", "Paused by evaluation")
        watched.wait_for_text("#leases", "<img src=x onerror=alert(1)>")
        watched.page.get_by_role("button", name="End the pause of evaluation").click()
        until(lambda: writer.get("/v1/pauses").json["state"] == "running")


def test_weights_have_a_history_with_receipts(writer: Api, board: Watching) -> None:
    version = publish(writer)
    board.wait_for_text("#version", str(version))
    row = board.page.get_by_role("row").filter(has=board.page.get_by_role("button", name=f"Version {version},"))
    row.wait_for()
    board.page.wait_for_function("() => document.querySelector('#updates tr').textContent.includes('applied')")
    assert "2 of 2" in row.inner_text()
    button = row.get_by_role("button")
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    board.wait_for_text(f"#receipts-u{version}", "cpu-1: applied")
    receipts = {r["worker"]: r for r in writer.get(f"/v1/updates/u{version}").json["receipts"]}
    shown = board.text(f"#receipts-u{version}")
    assert {line.split(":")[0] for line in shown.splitlines()} == set(receipts)
    button.click()
    assert board.page.locator(f"#receipts-u{version}").is_hidden()


def test_a_wrong_token_gets_the_form_again_and_a_read_token_does_not_pause(
    cartpole: HeadProcess, browser: Browser
) -> None:
    api = cartpole.api("read")
    with watching(browser, api.port) as watched:
        watched.enter("x" * 43)
        watched.wait_for_text("#sign-in-error", "invalid token for this job")
        watched.enter('{"read": "two words"}')
        watched.wait_for_text("#sign-in-error", "paste one token, without its JSON")
        assert watched.evaluate("sessionStorage.length") == 0, "refused tokens are not kept"
        watched.enter(f"  {api.token}\n".strip("\n"))
        watched.page.locator("#board").wait_for()
        assert watched.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert not [url for url in watched.requests if api.token in url]
        watched.page.reload()
        watched.page.locator("#board").wait_for()
        watched.wait_for_text("#pause-help", "pausing needs the write token")
        watched.page.get_by_role("button", name="Pause", exact=True).click(force=True)
        watched.wait_for_text("#trouble", "pausing needs the write token")
        assert api.get("/v1/pauses").json["leases"] == []
        watched.page.get_by_role("button", name="Forget the token").click()
        watched.page.locator("#sign-in").wait_for()
        assert watched.page.locator("#board").is_hidden()
        assert watched.evaluate("sessionStorage.length") == 0


def test_served_run_prints_a_link_with_access(browser: Browser, tmp_path: Path) -> None:
    spec = {"output": {"queue": {"capacityBatches": 2, "onFull": "wait"}}}
    manifest = write_manifest(tmp_path, "CartPole-v1", spec=spec)
    command = Command("run", str(manifest), "--serve", "--port", "0", "--directory", "head", cwd=tmp_path)
    try:
        assert command.process.stdout is not None
        link = next(line for line in command.process.stdout if line.startswith("live page: ")).split()[-1]
        address, _, fragment = link.partition("#")
        wait = "waiting for a learner: no consumer has asked for batches yet"
        assert next(line for line in command.process.stdout if line.startswith(wait))
        with watching(browser, int(urlsplit(address).port or 0)) as watched:
            watched.page.goto(link)
            watched.wait_for_text("#phase", "Waiting")
            watched.wait_for_text("#waiting", wait)
            assert watched.page.url == address, "the token is not in the address bar"
            assert watched.text("#queue") == "2 of 2"
            assert watched.text("#no-learners") == "No learner has asked for batches yet."
            api = Api(int(urlsplit(address).port or 0), fragment.removeprefix("token="))
            assert api.take(consumer="ppo").status == 200
            watched.wait_for_text("#learners", "ppo")
            watched.wait_for_text("#waiting", "the last one asked for batches")
            assert api.get("/v1/batches/next?wait=30&consumer=slow").status == 200
            watched.wait_for_text("#learners-note", "1 not acknowledged yet, the oldest for")
            assert "capacityBatches: 2" in watched.evaluate("document.querySelector('#manifest').textContent")
            watched.wait_for_text("#log", "head_ready")
    finally:
        command.interrupt()
        command.process.communicate(timeout=60)


def test_the_board_shows_progress_the_whole_run_and_what_went_wrong(cartpole: HeadProcess, browser: Browser) -> None:
    api = cartpole.api("write")
    drawn = "document.querySelectorAll('{} {}').length"
    publish(api)  # without a publish there is no lag to draw
    with watching(browser, api.port, api.token) as watched:
        # Progress and the time left.
        watched.wait_for_text("#target", "of 1,000,000,000,000 (0.0 %), about ")
        assert watched.text("#target").endswith(" days left")
        # Returns with their band, lengths, staleness, and where the time goes.
        watched.page.locator("#plot-return .band").wait_for(state="attached")
        assert watched.evaluate("document.querySelector('#plot-return .band').getAttribute('d')").endswith("Z")
        for name, unit in (("length", " frames"), ("staleness", " versions behind"), ("shares", " %")):
            watched.wait_for_text(f"#plot-{name} output", unit)
        watched.wait_for_text("#plot-shares output", "environment ")
        assert watched.evaluate(drawn.format("#plot-shares", "path")) >= 8, "a layer for each activity"
        # The whole run: from the head's first sample on.
        reach = "[Number(document.querySelector('#plot-fps svg').getAttribute('aria-valuemin')), {}]".format(
            "document.querySelector('#plot-fps .line').getAttribute('d').split('L').length"
        )
        watched.page.select_option("#window", "60")
        begins, points = watched.evaluate(reach)
        watched.page.select_option("#window", "all")
        whole_begins, whole_points = watched.evaluate(reach)
        assert whole_begins <= begins + 2
        assert whole_points >= points
        # A worker that dies is in the log, among warnings and errors alone, too.
        workers = [one for child in psutil.Process(cartpole.process.pid).children() for one in child.children()]
        workers[0].kill()
        watched.wait_for_text("#log", "warning: worker_lost worker=cpu-")
        watched.page.locator("#log-loud").check()
        shown = watched.page.locator("#log li:visible").all_inner_texts()
        assert shown
        assert all("warning: " in line or "error: " in line for line in shown)
        watched.wait_for_text("#worker-count", "2 of 2")


# -- for everybody ---------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(writer: Api, browser: Browser) -> None:
    with watching(browser, writer.port) as watched:
        press = watched.page.keyboard.press
        watched.page.locator("#sign-in").wait_for()
        assert watched.evaluate("document.activeElement.id") == "token", "one can type at once"
        watched.page.keyboard.type(writer.token)
        press("Enter")
        watched.page.locator("#board").wait_for()

        def tab_to(wanted: str) -> None:
            for _ in range(40):
                press("Tab")
                if watched.evaluate(f"document.activeElement.matches({wanted!r})"):
                    outline = watched.evaluate("getComputedStyle(document.activeElement).outline")
                    assert "solid 3px" in outline, f"focus is seen: {outline}"
                    return
            raise AssertionError(f"Tab does not reach {wanted}")

        watched.page.locator("body").press("Home")
        tab_to("#pause")
        press("Enter")
        until(lambda: [lease["owner"] for lease in writer.get("/v1/pauses").json["leases"]] == ["page"])
        watched.wait_for_text("#pause", "Resume")
        assert watched.evaluate("document.activeElement.id") == "pause", "news do not take the focus away"
        press("Space")
        until(lambda: writer.get("/v1/pauses").json["leases"] == [])
        watched.wait_for_text("#phase", "Running")
        tab_to("#plot-fps svg")
        press("Home")
        oldest = watched.text("#plot-fps output")
        value = watched.evaluate("document.activeElement.getAttribute('aria-valuetext')")
        assert value.startswith(oldest)
        assert "highest" in value
        press("End")
        assert watched.text("#plot-fps output") != oldest
        press("ArrowLeft")


AUDIT = (Path(browser_module.__file__).parent / "audit.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["sign-in", "board"])
def test_everybody_can_read_it(writer: Api, browser: Browser, scheme: Any, place: str) -> None:
    publish(writer)
    token = writer.token if place == "board" else ""
    with watching(browser, writer.port, token, color_scheme=scheme) as watched:
        if place == "sign-in":
            watched.enter("x" * 40)
            watched.wait_for_text("#sign-in-error", "invalid token")
        else:
            watched.wait_for_text("#updates", "applied")
            watched.page.locator("#updates button").first.click()
            watched.page.locator("td.receipts li").first.wait_for()
        found = watched.evaluate(AUDIT)
        assert found.pop("checked") > (40 if place == "board" else 8)
        headings = found.pop("headings")
        assert headings[0] == "H1"
        assert set(headings[1:]) == {"H2"}
        assert found.pop("titled") in ("Cormorant", "cartpole: Running")
        assert found == {
            "faint": [], "nameless": [], "twice": [], "twins": [], "dangling": [], "headless": 0, "loud": [],
            "small": [], "language": "en", "landmarks": [1, 1, 1],
        }  # fmt: skip
        dark = watched.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", dark)[:3])) < 60) == (scheme == "dark")


def test_a_screen_reader_hears_what_changes_and_not_every_number(writer: Api, board: Watching) -> None:
    board.wait_for_text("#phase", "Running")
    # Both live regions, board for all that is said in them.
    board.evaluate(
        """() => {
          window.said = [];
          for (const id of ["said", "trouble"])
            new MutationObserver(() => window.said.push(document.getElementById(id).textContent))
              .observe(document.getElementById(id), {childList: true, characterData: true, subtree: true});
        }"""
    )
    frames = board.text("#frames")
    board.page.wait_for_function("old => document.querySelector('#frames').textContent !== old", arg=frames)
    time.sleep(2)
    assert board.evaluate("window.said") == []
    with paused(writer):
        board.wait_for_text("#said", "cartpole: Paused.")
    board.wait_for_text("#said", "cartpole: Running.")
    assert board.evaluate("window.said") == ["cartpole: Paused.", "cartpole: Running."]


@pytest.mark.parametrize("width", [320, 480, 760])
def test_a_narrow_window_has_it_all(writer: Api, browser: Browser, width: int) -> None:
    with watching(browser, writer.port, writer.token, viewport={"width": width, "height": 800}) as watched:
        watched.wait_for_text("#phase", "Running")
        assert watched.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("#pause", "#plot-fps svg", "#plot-return svg"):
            box = watched.page.locator(name).bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width


def test_the_end_stays_in_view_and_in_a_report(tmp_path: Path, browser: Browser) -> None:
    frames = {"framesPerBatch": 20, "totalFrames": 60}
    job = make_job(lengths=(3, 8), dataset=f"file://{tmp_path}/data", collection=frames)
    with ExitStack() as head:
        served = head.enter_context(serve(job, directory=tmp_path / "head"))
        with watching(browser, served.reader.port, served.reader.token) as watched:
            watched.wait_for_text("#link-text", "The job has completed.")
            assert watched.page.get_by_role("button", name="Pause").get_attribute("aria-disabled") == "true"
            head.close()
            watched.wait_for_text("#link-text", "The job has completed.")
            title = f"{job.metadata.name}: Completed"
            assert (watched.text("#phase"), watched.page.title()) == ("Completed", title)
            assert watched.text("#target") == "of 60 (100.0 %)", "the final count, and no time left"
            assert (watched.text("#frames"), watched.text("#fps-mean")) == ("60", "on average")
            assert 0 < int(watched.text("#fps").replace(",", "")) <= 80, (
                "at most 20 more were stepped, in a second or more"
            )
            assert watched.page.get_by_role("button", name="Pause").get_attribute("aria-disabled") == "true"
            hidden = "['queue-tile', 'learners-card', 'plot-staleness'].map(id => document.getElementById(id).hidden)"
            assert watched.evaluate(hidden) == [True] * 3, "a job without a queue has no rows about one"
            assert watched.text("#now-title") == "At the end"
            assert not watched.page.locator("#workers-card").is_visible()
            shown = {name: watched.text(f"#{name}") for name in ("frames", "return", "episodes", "target")}
    (tmp_path / "report.html").write_text(report_of(served.server.moments))
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(f"file://{tmp_path}/report.html")
    assert page.title() == title
    assert {name: page.inner_text(f"#{name}") for name in shown} == shown
    assert "Completed" in page.inner_text("#events")
    assert "cormorant " in page.inner_text("#versions")
    assert page.get_by_role("button", name="Pause").count() == 0
    assert errors == []


def start(folder: Path, port: int, *options: str, task: str = "CartPole-v1") -> HeadProcess:
    ports = ("--port", str(port), "--data-port", str(unused_port()))
    return HeadProcess(write_manifest(folder, task, totalFrames=10**12), folder / "head", *ports, *options)


def test_it_survives_a_head_that_falls_silent_is_killed_and_started_again(tmp_path: Path, browser: Browser) -> None:
    port = unused_port()
    line = "document.querySelector('#plot-fps .line').getAttribute('d')"
    with start(tmp_path, port) as head:
        api = head.api("write")
        with watching(browser, port, api.token, may_fail=AWAY) as watched:
            watched.wait_for_text("#phase", "Running")
            epoch = watched.text("#epoch")
            head.process.send_signal(signal.SIGSTOP)
            watched.wait_for_text("#phase", "Disconnected")
            head.process.send_signal(signal.SIGCONT)
            watched.page.get_by_role("button", name="Try now").click()
            watched.wait_for_text("#link-text", "Live")
            watched.wait_for_text("#phase", "Running")
            watched.page.wait_for_function(f"() => {line}.split('L').length > 4")
            watched.wait_for_text("#target", " left")
            assert watched.text("#now-title") == "Now"
            head.kill()
            watched.wait_for_text("#phase", "Disconnected")
            watched.wait_for_text("#link-text", "Retrying")
            assert (watched.text("#said"), watched.page.title()) == ("Disconnected.", "cartpole: Disconnected")
            assert watched.text("#frames").replace(",", "").isdigit(), "the last numbers stay"
            assert watched.text("#now-title").startswith("Last seen at ")
            assert " left" not in watched.text("#target")
            watched.page.get_by_role("button", name="Pause", exact=True).click()
            watched.wait_for_text("#trouble", "Could not pause: the head does not answer.")
            with start(tmp_path, port) as second:
                # It listens before its first worker is there: the page, if it tries again by then, says "Starting".
                watched.page.wait_for_function(
                    "() => ['Starting', 'Running'].includes(document.querySelector('#phase').textContent)"
                )
                second.api()
                watched.wait_for_text("#link-text", "Live")
                watched.wait_for_text("#phase", "Running")
                assert watched.text("#epoch") != epoch
                assert watched.text("#now-title") == "Now"
                watched.wait_for_text("#events", "the head was restarted")
                assert watched.text("#trouble") == ""
                assert watched.evaluate(line).count("M") >= 2, "what was before stays in view, with a gap"
                moments = watched.text("#frames")
                watched.page.wait_for_function(
                    "old => document.querySelector('#frames').textContent !== old", arg=moments
                )
                status = second.api().get("/v1/status").json
                seconds = time.time() - datetime.fromisoformat(status["started_at"]).timestamp()
                second.end()
                watched.wait_for_text("#phase", "Stopped")
                mean = float(watched.text("#fps").replace(",", ""))
                assert mean > 0.7 * status["frames"]["stepped"] / seconds, "of this head alone"
                watched.wait_for_text("#link-text", "The head stopped, and another one may continue the job. Retrying")
                assert watched.page.title().endswith(": Stopped")
            assert watched.page.locator("#sign-in").is_hidden()


def test_expired_token_gets_a_sentence_and_the_form(tmp_path: Path, browser: Browser) -> None:
    port = unused_port()
    with start(tmp_path, port) as head:
        old = head.api("read").token
        with watching(browser, port, old, may_fail=AWAY) as watched:
            watched.wait_for_text("#phase", "Running")
            head.kill()
            (tmp_path / "head" / "tokens.json").unlink()
            with start(tmp_path, port) as second:
                api = second.api("read")
                watched.page.locator("#sign-in").wait_for()
                watched.wait_for_text("#sign-in-error", "no longer accepts this token")
                assert watched.page.locator("#board").is_hidden()
                assert watched.evaluate("sessionStorage.length") == 0
                assert watched.evaluate("document.activeElement.id") == "token"
                watched.enter(api.token)
                watched.page.locator("#board").wait_for()
                watched.wait_for_text("#phase", "Running")


def test_preview_polls_only_while_open(tmp_path: Path, browser: Browser) -> None:
    with start(tmp_path, unused_port(), task="Pong-v5") as head:
        api = head.api("read")
        with watching(browser, api.port, api.token, may_fail=("401", "422")) as watched:
            watched.wait_for_text("#phase", "Running")
            time.sleep(1)
            assert watched.asked("/picture") == 0, "closed: nobody looks"
            watched.page.locator("#preview summary").click()
            watched.page.wait_for_function(
                "() => document.querySelector('#preview-canvas').ariaLabel?.includes('environment 0 of cpu-0')"
            )
            canvas = "document.querySelector('#preview-canvas')"
            assert watched.evaluate(f"[{canvas}.width, {canvas}.height]") == [84, 84]
            seen = set()
            until(lambda: seen.add(watched.evaluate(f"{canvas}.toDataURL()")) or len(seen) >= 5, what="Pong moves")
            pixels = watched.evaluate(f"[...{canvas}.getContext('2d').getImageData(0, 0, 84, 84).data]")
            assert len(set(pixels[0::4])) > 3, "a picture of something"
            watched.page.fill("#preview-env", "3")
            watched.page.keyboard.press("Enter")
            watched.page.wait_for_function(
                "() => document.querySelector('#preview-canvas').ariaLabel.includes('environment 3')"
            )
            watched.page.fill("#preview-env", "99")
            watched.page.keyboard.press("Enter")
            watched.wait_for_text("#preview-note", "there is no environment 99")
            watched.page.locator("#preview summary").click()
            time.sleep(0.5)
            asked = watched.asked("/picture")
            time.sleep(1.5)
            assert watched.asked("/picture") == asked, "closed again"
