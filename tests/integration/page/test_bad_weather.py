"""The live page while heads are killed, stopped and replaced, and its previews of observations."""

import signal
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from cormorant_testing.browser import watching
from cormorant_testing.heads import HeadProcess, write_manifest
from cormorant_testing.scripts import until, unused_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AWAY = ("401", "503", "ERR_")


def start(folder: Path, port: int, *options: str, task: str = "CartPole-v1") -> HeadProcess:
    ports = ("--port", str(port), "--data-port", str(unused_port()))
    return HeadProcess(write_manifest(folder, task, totalFrames=10**12), folder / "head", *ports, *options)


def test_it_survives_a_head_that_is_killed_and_started_again(tmp_path: Path, browser: Browser) -> None:
    port = unused_port()
    line = "document.querySelector('#plot-fps .line').getAttribute('d')"
    with start(tmp_path, port) as head:
        api = head.api("write")
        with watching(browser, port, api.token, may_fail=AWAY) as watched:
            watched.wait_for_text("#phase", "Running")
            epoch = watched.text("#epoch")
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
            colors = "['#fps', '#job', 'dt'].map((it) => getComputedStyle(document.querySelector(it)).color)"
            number, name, small = watched.evaluate(colors)
            assert number == small != name, "dim"
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
                number, name, small = watched.evaluate(colors)
                assert number == name != small
                watched.wait_for_text("#events", "the head was restarted")
                assert watched.text("#trouble") == ""
                assert watched.evaluate(line).count("M") >= 2, "what was before stays in view, with a gap"
                moments = watched.text("#frames")
                watched.page.wait_for_function(
                    "old => document.querySelector('#frames').textContent !== old", arg=moments
                )
                second.end()
                watched.wait_for_text("#phase", "Stopped")
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


def test_a_head_that_falls_silent_is_noticed(tmp_path: Path, browser: Browser) -> None:
    with start(tmp_path, unused_port()) as head:
        api = head.api("read")
        with watching(browser, api.port, api.token, may_fail=AWAY) as watched:
            watched.wait_for_text("#phase", "Running")
            head.process.send_signal(signal.SIGSTOP)
            try:
                watched.wait_for_text("#phase", "Disconnected")
            finally:
                head.process.send_signal(signal.SIGCONT)
            watched.page.get_by_role("button", name="Try now").click()
            watched.wait_for_text("#link-text", "Live")
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
