"""`cormorant status`: lines for a person, and a watch that outlives a head."""

from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_cli.commands import status as command
from cormorant_cli.commands.status import follow, lines_of
from cormorant_cli.connection import Connection
from cormorant_cli.errors import HeadAway
from cormorant_contract.rest.status import (
    Condition,
    EpisodeReport,
    GroupReport,
    InferenceReport,
    QueueReport,
    Status,
    WeightsReport,
    Worker,
    Workers,
)
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead, job_status

WORKER = Worker(
    id="cpu-0", group="cpu", ready=True, phase="stepping", attempt=1, version=6, lag=1, frames=900, per_second=80.0,
    env_restarts=0, pid=1,
)  # fmt: skip


def status(**changes: object) -> Status:
    counted = {"collected": 12_345, "target": 100_000, "per_second": 1234.4, "stepped": 12_400}
    groups = (GroupReport(name="cpu", desired=3, ready=2), GroupReport(name="gpu", desired=1, ready=1))
    known = {
        "frames": {**counted, "delivered": 0, "dropped": {}},
        "episodes": EpisodeReport(count=3, mean_return=-20.5, mean_length=900.0),
        "weights": WeightsReport(version=7, min_applied_version=6),
        "groups": groups,
        "restarts": 2,
        "queue": QueueReport(capacity=4, waiting=1, ready=1, lent=0, acked=0, redelivered=0, ended=False),
    }
    return Status.model_validate(job_status(**known | changes))


def test_status_says_what_is_waited_for_and_what_fills_the_queue() -> None:
    sentence = "waiting for a learner: no consumer has asked for batches yet"
    found = status(
        conditions=(
            Condition(type="Ready", status="True", reason="EnoughWorkers", message="2 of 2 workers are ready"),
            Condition(type="Progressing", status="False", reason="WaitingForConsumer", message=sentence),
            Condition(type="Paused", status="False", reason="NotPaused", message="the job is not paused"),
        ),
        queue=QueueReport(capacity=4, waiting=6, ready=1, lent=2, acked=0, redelivered=0, ended=False),
    )
    lines = list(lines_of(found))
    without = status(queue=QueueReport(capacity=0, waiting=0, ready=0, lent=0, acked=0, redelivered=0, ended=False))
    assert not any("queue" in line for line in lines_of(without)), "a dataset job has none"
    assert "  queue     4 of 4, 2 waiting for room, 1 returned, 2 with learners" in lines
    assert "  episodes  3, mean return -20.50 over the last 3" in lines
    assert lines[-2:] == ["  Ready: 2 of 2 workers are ready", f"  Progressing: {sentence}"]


def test_status_says_what_servers_do_and_how_policies_are_called() -> None:
    call = "layers; tried for 0.4 s"
    groups = (
        GroupReport(name="cpu", desired=2, ready=2),
        GroupReport(name="act", desired=1, ready=1, policy_call=call),
    )
    served = InferenceReport(
        rows_per_second=12_345.6, rows_per_act=48.25, padding=0.25, wait_ms=0.4, act_ms=1.25, busy=0.5
    )
    lines = list(lines_of(status(groups=groups, inference={"act": served})))
    assert lines[2:6] == [
        "  workers   cpu: 2 of 2 ready",
        "  workers   act: 1 of 1 ready",
        f"  policy    act: {call}",
        "  servers   act: 12,346 rows/s, 48.2 rows per act (25% padding), wait 0.40 ms, act 1.25 ms, busy 50%",
    ]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Status | None], Iterator[tuple[str, str]]]]:
    """What the head answers, which a test changes (None: nothing), and what a watch shows of it."""
    monkeypatch.setattr(command, "_RETRY_S", 0.0)
    now: list[Status | None] = []

    def answer(heard: Heard) -> Say:
        if now[-1] is None:
            return Say(breaks=True)
        found = Workers(workers=(WORKER,)) if heard.path.endswith("/workers") else now[-1]
        return Say(200, found.model_dump_json().encode())

    with ScriptedHead(answer) as head:
        connection = Connection(url=head.url, token="t", token_file="", reconnect_s=0.0)
        yield now, follow(connection, 0.0, has_workers=True)


def test_watch_goes_on_with_the_next_head(watch: Any) -> None:
    now, seen = watch
    now.append(status())
    first, error = next(seen)
    assert (first.splitlines()[0], error) == ("pong: Running", "")
    assert "  restarts  2" in first.splitlines()
    assert first.splitlines()[-1] == "  cpu-0     stepping, 900 frames, 80/s, version 6, 1 behind, attempt 1"
    now.append(None)
    for shown, error in (next(seen), next(seen)):
        assert shown == first
        assert "no head answers at" in error
    now.append(status(phase="Paused"))
    last, error = next(seen)
    assert (last.splitlines()[0], error) == ("pong: Paused", "")


def test_watch_without_a_first_answer_is_an_error(watch: Any) -> None:
    now, seen = watch
    now.append(None)
    with pytest.raises(HeadAway, match="no head answers at"):
        next(seen)
