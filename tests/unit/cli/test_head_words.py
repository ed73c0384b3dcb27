"""Why a head ended, from its termination message through the operator's status to what a person reads."""

import json
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_testing.operator_world import World, make_spec, running
from cormorant_testing.scripted_head import Heard, Say

WORDS = "file:///data/run cannot be written: no permission to write in /data; choose another URI"


def told(world: World, api_server: Any) -> int:
    """Run `cormorant doctor pong` at an API server that has this job and nothing else. Returns the exit code."""
    metadata = {"name": "pong", "namespace": "rl", "uid": "u", "creationTimestamp": world.now.isoformat()}
    status = world.job.status.to_document()
    job = {"kind": "CollectorJob", "metadata": metadata, "spec": make_spec(), "status": status}
    nothing = {"apiVersion": "v1", "metadata": {}, "items": [], "gitVersion": "v1.34.0", "status": {"allowed": True}}

    def answer(heard: Heard) -> Say:
        return Say(200, json.dumps(job if heard.path.endswith("/collectorjobs/pong") else nothing).encode())

    with api_server(answer):
        return run(["doctor", "pong"])


@pytest.mark.parametrize(
    ("exit_code", "condition", "ended", "remedy"),
    [
        (3, "Ready=False/HeadBlocked", "exited with code 3 (Error)", "; fix the cause"),
        (2, "Failed=True/HeadRefused", "rejected its configuration", ""),
        (1, "Ready=False/HeadFailed", "exited with code 1 (Error)", ""),
    ],
)
def test_head_words_are_shown_by_doctor(
    exit_code: int, condition: str, ended: str, remedy: str, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world = running()
    world.finish("pong-head-1", exit_code=exit_code, message=json.dumps({"frames": 1000, "reason": WORDS}))
    world.tick(1)
    world.step()
    kind, _, value = condition.partition("=")
    assert world.condition(kind) == value

    assert told(world, api_server) == 1
    lines = capsys.readouterr().out.splitlines()
    said = f"BAD   {condition.replace('/', ', ')}: pong-head-1 {ended}: {WORDS}{remedy}"
    assert [line for line in lines if line.startswith(said)], lines
    (last,) = [line for line in lines if "most recently pong-head-1" in line]
    assert last.endswith(f"ago: Error, exit code {exit_code}: {WORDS}")
