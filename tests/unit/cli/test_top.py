"""`cormorant top`: the table, and sources that answer, fail or keep silent."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial

import pytest
from typer.testing import CliRunner

from cormorant_cli import __main__ as entry
from cormorant_cli.commands import top
from cormorant_cli.commands.status import lines_of as status_lines
from cormorant_cli.errors import BadInput, CommandFailed
from cormorant_cli.sources import Board, Entry, Figures, OpenHead, Reading, Written, url_heads
from cormorant_cli.top_table import cut, lines_of, rows_of
from cormorant_contract.rest.status import (
    Condition,
    EpisodeReport,
    FrameCounts,
    GroupReport,
    InferenceReport,
    QueueReport,
    Status,
    WeightsReport,
    Worker,
    Workers,
)

WORKER = Worker(
    id="cpu-0", group="cpu", ready=True, phase="stepping", attempt=1, version=6, lag=1, frames=900, per_second=80.0,
    env_restarts=0, pid=1,
)  # fmt: skip


def status(job: str = "pong", **changes: object) -> Status:
    queue = QueueReport(capacity=4, waiting=1, ready=1, lent=0, acked=0, redelivered=0, ended=False)
    known: dict[str, object] = {
        "job": job,
        "namespace": "default",
        "epoch": "e",
        "phase": "Running",
        "conditions": (),
        "frames": FrameCounts(
            collected=12_345, target=100_000, per_second=1234.4, stepped=12_400, delivered=0, dropped={}
        ),
        "episodes": EpisodeReport(count=3, mean_return=-20.5, mean_length=900.0),
        "weights": WeightsReport(version=7, min_applied_version=6),
        "groups": (GroupReport(name="cpu", desired=3, ready=2), GroupReport(name="gpu", desired=1, ready=1)),
        "restarts": 2,
        "pause_state": "running",
        "pauses": (),
        "queue": queue,
        "consumers": (),
        "data_port": 0,
        "listeners": 0,
        "listeners_dropped": 0,
        "started_at": datetime.now(UTC),
    }
    return Status.model_validate(known | changes)


class SaidHead:
    """A head that says what it is told to."""

    def __init__(self, *answers: Callable[[], Status], workers: tuple[Worker, ...] = ()) -> None:
        self._answers, self._workers = list(answers), workers

    def status(self) -> Status:
        return self._answers.pop(0)() if len(self._answers) > 1 else self._answers[0]()

    def workers(self) -> Workers:
        return Workers(workers=self._workers)


def fail(sentence: str) -> Status:
    raise CommandFailed(sentence)


def fails(sentence: str) -> OpenHead:
    return lambda: nullcontext(SaidHead(partial(fail, sentence)))


def says(found: Status, *workers: Worker) -> OpenHead:
    return lambda: nullcontext(SaidHead(lambda: found, workers=workers))


HERE, GONE = "http://here:8000", "http://gone:8000"


def test_a_job_is_one_line() -> None:
    (row,) = rows_of([Entry(name="u", reading=Reading(status=status()), is_asked=True)])
    assert row.cells == (
        "pong", "Running", "1,234", "12,345 (12%)", "3/4", "7", "1", "-20.50", "1/4", "", "2 restarts"
    )  # fmt: skip


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
    lines = list(status_lines(found))
    assert "  queue     4 of 4, 2 waiting for room, 1 returned, 2 with learners" in lines
    assert "  episodes  3, mean return -20.50 over the last 3" in lines
    assert lines[-2:] == ["  Ready: 2 of 2 workers are ready", f"  Progressing: {sentence}"]


def test_top_shows_no_more_waiting_than_there_is_room_for() -> None:
    queue = QueueReport(capacity=4, waiting=6, ready=1, lent=2, acked=0, redelivered=0, ended=False)
    (row,) = rows_of([Entry(name="u", reading=Reading(status=status(queue=queue)), is_asked=True)])
    assert row.queue == "4/4"


def test_status_says_what_servers_do_and_how_policies_are_called() -> None:
    call = "layers: 33 us an act, 1.55 times as fast as eager; tried for 0.4 s"
    groups = (
        GroupReport(name="cpu", desired=2, ready=2),
        GroupReport(name="act", desired=1, ready=1, policy_call=call),
    )
    served = InferenceReport(
        rows_per_second=12_345.6, rows_per_act=48.25, padding=0.25, wait_ms=0.4, act_ms=1.25, busy=0.5
    )
    lines = list(status_lines(status(groups=groups, inference={"act": served})))
    assert lines[2:6] == [
        "  workers   cpu: 2 of 2 ready",
        "  workers   act: 1 of 1 ready",
        f"  policy    act: {call}",
        "  servers   act: 12,346 rows/s, 48.2 rows an act (25% padding), wait 0.40 ms, act 1.25 ms, busy 50%",
    ]


def test_columns_are_aligned_and_workers_stand_below_their_job() -> None:
    entries = [Entry(name="u", reading=Reading(status=status(namespace="team-a"), workers=(WORKER,)), is_asked=True)]
    heading, job, worker = lines_of(tuple(rows_of(entries)))
    assert job.startswith("team-a/pong  Running")
    assert worker.startswith("  cpu-0      stepping")
    end = heading.index("FRAMES/S") + len("FRAMES/S")
    assert (job[:end].split()[-1], worker[:end].split()[-1]) == ("1,234", "80")


def test_a_job_that_fails_is_a_cell_and_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    heads = {HERE: says(status()), GONE: fails("the token is\nnone of the job's")}
    top.show(Board(heads, interval_s=0), is_once=True, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["pong", "Running", "1,234"]
    assert lines[2].startswith("http://gone:8000  Unreachable")
    assert lines[2].endswith("the token is none of the job's")
    assert lines[3].split()[:5] == ["2", "jobs", "1", "answer", "1,234"]


def test_what_a_job_said_last_stays_when_it_falls_silent() -> None:
    head = SaidHead(status, partial(fail, "no head answers"))
    board = Board({"u": lambda: nullcontext(head)}, interval_s=0.01)
    deadline = time.monotonic() + 10
    while not board.entries()[0].error:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    board.close()
    (row,) = rows_of(board.entries())
    assert (row.job, row.phase, row.fps, row.note, row.is_stale) == (
        "pong", "Unreachable", "1,234", "no head answers", True
    )  # fmt: skip


def test_a_job_that_keeps_silent_holds_nobody_up() -> None:
    release = threading.Event()

    def too_late() -> Status:
        release.wait(20)
        return fail("too late")

    heads = {"slow": lambda: nullcontext(SaidHead(too_late)), HERE: says(status())}
    board = Board(heads, interval_s=0)
    try:
        slow, quick = board.wait(0.2)
    finally:
        release.set()
    assert (slow.reading, slow.error) == (None, "no answer within 0.2 s")
    assert quick.reading is not None


def test_json_has_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    heads = {HERE: says(status(), WORKER), GONE: fails("gone")}
    top.show(Board(heads, workers=True, interval_s=0), is_once=True, as_json=True)
    good, bad = json.loads(capsys.readouterr().out)["jobs"]
    assert (good["status"]["frames"]["collected"], good["workers"][0]["id"], good["error"]) == (12_345, "cpu-0", "")
    assert (bad["status"], bad["workers"], bad["error"]) == (None, [], "gone")


def test_it_fails_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["top", "--url", "ftp://gone", "--url", "nonsense"]) == 1
    done = capsys.readouterr()
    assert done.out.count("Unreachable") == 2
    assert '"nonsense" is not the URL of a head' in done.out
    assert done.err == "no job answered; see the table for the reasons\n"


@pytest.mark.parametrize(
    ("urls", "files", "sentence"),
    [((), (), "no head given"), (("http://a", "http://b", "http://c"), ("x", "y"), "2 token files for 3 URLs")],
)
def test_options_that_do_not_fit_are_refused(urls: tuple[str, ...], files: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        url_heads(urls, token="", token_files=files)


def test_help_names_the_ways_to_say_where() -> None:
    from cormorant_cli.app import app

    shown = CliRunner().invoke(app, ["top", "--help"], env={"COLUMNS": "200"}).output
    assert "CORMORANT_URL" in shown
    assert "--once" in shown


def test_what_has_no_room_on_the_screen_is_counted() -> None:
    entries = [Entry(name=f"u{i}", reading=Reading(status=status(f"job-{i}")), is_asked=True) for i in range(300)]
    shown = cut(tuple(rows_of(entries)), 20)
    assert [row.job for row in (shown[0], *shown[17:])] == ["job-0", "job-17", "282 more lines", "300 jobs"]
    assert len(cut(shown, 20)) == 20


def test_heads_answer_is_shown_before_the_status() -> None:
    written = Written(
        namespace="rl", note="", age_s=70.0, is_stale=False, status={},
        figures=Figures(
            phase="Starting", frames=1, target=0, per_second=0.0, ready=0, desired=1, version=0, min_applied_version=0
        ),
    )  # fmt: skip
    head = Entry(name="pong", reading=Reading(status=status(namespace="rl")), written=written, is_asked=True)
    silent = Entry(name="pong", written=written, error="no way there", is_asked=True)
    now, before, total = (row.cells for row in rows_of([head, silent]))
    assert (now[:4], now[9]) == (("pong", "Running", "1,234", "12,345 (12%)"), "0s")
    assert (before[:4], before[9:]) == (("pong", "Starting", "0", "1"), ("70s", "no way there"))
    assert total[:5] == ("2 jobs", "1 moving", "1,234", "12,346", "3/5")
