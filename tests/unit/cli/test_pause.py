"""When a pause or a resume is done, and that waiting for it is said."""

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.commands.pause import is_reached
from cormorant_cli.printing import told_when_slow
from cormorant_contract.rest.pauses import PauseLease, Pauses, PauseState
from cormorant_testing.scripted_head import Say

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = PauseLease(id="p1", owner="other", reason="", mode="now", created_at=NOW, expires_at=NOW, state="paused")


@pytest.mark.parametrize(
    ("is_paused", "spec_paused", "state", "leases", "reached"),
    [
        (True, False, "paused", (LEASE,), False),
        (True, True, "draining", (), False),
        (True, True, "paused", (), True),
        (False, True, "paused", (), False),
        # The head has received it; its workers are still paused.
        (False, False, "paused", (), False),
        (False, False, "running", (), True),
        (False, False, "paused", (LEASE,), True),
    ],
)
def test_pause_and_resume_are_done_when_the_workers_obey(
    is_paused: bool, spec_paused: bool, state: PauseState, leases: tuple[PauseLease, ...], reached: bool
) -> None:
    found = Pauses(state=state, spec_paused=spec_paused, leases=leases)
    assert is_reached(found, is_paused=is_paused) is reached


@pytest.mark.parametrize(("command", "word"), [("pause", "paused"), ("resume", "resumed")])
def test_workers_that_cannot_be_checked_fail_the_command(
    command: str, word: str, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = json.dumps({"kind": "CollectorJob", "metadata": {"name": "pong", "namespace": "rl", "uid": "1"}}).encode()
    refused = Say(403, b'{"kind": "Status", "message": "pods is forbidden"}')
    with api_server(lambda heard: Say(200, job) if heard.method == "PATCH" else refused) as server:
        assert run([command, "pong", "-n", "rl"]) == 1
        assert f"{word} in its spec, but its workers could not be checked: " in capsys.readouterr().err
        assert run([command, "pong", "-n", "rl", "--wait", "0"]) == 0
        assert json.loads(server.heard[0].body) == {"spec": {"paused": command == "pause"}}


def test_only_slow_waits_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with told_when_slow("until pigs fly", after_s=600):
        pass
    said = ""
    with told_when_slow("until the workers are paused, at most 30 s", after_s=0):
        while not said:
            said = capsys.readouterr().err
            time.sleep(0.01)
    assert said == "waiting until the workers are paused, at most 30 s\n"
