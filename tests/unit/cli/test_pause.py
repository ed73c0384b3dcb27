"""A pause in a job's spec, and that waiting is said."""

import json
import time
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.printing import told_when_slow
from cormorant_testing.scripted_head import Say


@pytest.mark.parametrize(("command", "word"), [("pause", "true"), ("resume", "false")])
def test_pause_without_a_lease_is_written_to_the_spec(
    command: str, word: str, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = json.dumps({"kind": "CollectorJob", "metadata": {"name": "pong", "namespace": "rl", "uid": "1"}}).encode()
    with api_server(lambda _heard: Say(200, job)) as server:
        assert run([command, "pong", "-n", "rl"]) == 0
        (heard,) = server.heard
    assert (heard.method, json.loads(heard.body)) == ("PATCH", {"spec": {"paused": command == "pause"}})
    said = f"rl/pong: spec.paused is {word}; `cormorant status pong -n rl` shows when its workers "
    assert capsys.readouterr().out.startswith(said)


def test_only_slow_waits_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with told_when_slow("until pigs fly", after_s=600):
        pass
    said = ""
    with told_when_slow("until the workers are paused, at most 30 s", after_s=0):
        while not said:
            said = capsys.readouterr().err
            time.sleep(0.01)
    assert said == "waiting until the workers are paused, at most 30 s\n"
