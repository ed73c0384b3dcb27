"""What becomes of a publish: every way from staged to its end."""

from datetime import UTC, datetime

import pytest

from cormorant_api.weights.updates import UpdateTracker, update_id, version_of
from cormorant_contract.rest.updates import ModelUpdate, Update, UpdateTimings, WorkerCounts
from cormorant_testing.clock import Clock
from cormorant_testing.cost import lines_run
from cormorant_worker.fleet.stats import WorkerReceipts
from cormorant_worker.weights.staged import PolicyVersion


class Board:
    def __init__(self) -> None:
        self.clock = Clock(50.0)
        self.results: list[tuple[int, str]] = []
        self.tracker = UpdateTracker(
            apply_within_s=10,
            clock=self.clock,
            on_result=lambda update: self.results.append((update.version, update.state)),
        )

    def stage(self, version: int, *models: str) -> None:
        described = ModelUpdate(digest="xxh3:1", etag='"1"', bytes=10, tensors=2)
        staged = Update(
            update_id=update_id(version),
            model="policy",
            models=dict.fromkeys(models or ("policy",), described),
            version=version,
            digest="xxh3:1",
            etag='"1"',
            bytes=10,
            tensors=2,
            state="staged",
            workers=WorkerCounts(total=0, acked=0, failed=0),
            receipts=(),
            staged_at=datetime.now(UTC),
            timings=UpdateTimings(),
        )
        self.tracker.stage(staged, received=self.clock.now)

    def hand_over(self, version: int, *, applied: tuple[str, ...] = (), waiting: tuple[str, ...]) -> None:
        receipt = WorkerReceipts(version=PolicyVersion(version), applied=applied, waiting=waiting)
        self.tracker.hand_over(receipt, distribute_ms=1)

    def publish(self, version: int, *models: str, waiting: tuple[str, ...] = ("cpu-0", "cpu-1")) -> None:
        self.stage(version, *models)
        self.hand_over(version, waiting=waiting)

    def see(self, version: int) -> Update:
        found = self.tracker.find(version)
        assert found is not None
        return found

    def wait(self, seconds: float, *, can_apply: bool = True) -> None:
        self.clock.now += seconds
        self.tracker.tick(can_apply=can_apply)


def test_applied_when_every_worker_has_said_so() -> None:
    board = Board()
    board.publish(1)
    board.clock.now += 0.5
    board.tracker.acknowledged("cpu-0", 1)
    assert (board.see(1).state, board.results) == ("applying", [])
    board.tracker.acknowledged("cpu-1", 1)
    assert board.results == [(1, "applied")]
    update = board.see(1)
    assert (update.workers.total, update.workers.acked) == (2, 2)
    assert [(r.worker, r.state, r.latency_ms) for r in update.receipts] == [
        ("cpu-0", "applied", 500.0),
        ("cpu-1", "applied", 500.0),
    ]
    assert update.timings.apply_ms == 500.0


def test_a_word_that_comes_before_the_hand_over_is_not_lost() -> None:
    board = Board()
    board.stage(1)
    board.tracker.acknowledged("cpu-0", 1)
    assert board.see(1).state == "staged", "the other worker is not known yet"
    board.hand_over(1, waiting=("cpu-0", "cpu-1"))
    assert board.see(1).state == "applying"
    board.tracker.acknowledged("cpu-1", 1)
    assert board.see(1).state == "applied"


def test_older_update_of_another_model_is_applied_with_the_newer() -> None:
    board = Board()
    board.publish(1, "policy")
    board.publish(2, "critic")
    assert board.see(1).state == "applying"
    board.tracker.acknowledged("cpu-0", 2)
    board.tracker.acknowledged("cpu-1", 2)
    assert (board.see(1).state, board.see(2).state) == ("applied", "applied")


@pytest.mark.parametrize(
    ("waiting", "seconds", "can_apply", "state"),
    [
        (("cpu-0",), 9.9, True, "applying"),
        (("cpu-0",), 10.1, True, "failed"),
        (("cpu-0",), 100, False, "applying"),  # a pause does not make workers late
        ((), 9.9, True, "applying"),
        ((), 11, True, "failed"),
    ],
)
def test_update_that_nobody_acknowledges_fails(
    waiting: tuple[str, ...], seconds: float, can_apply: bool, state: str
) -> None:
    board = Board()
    board.publish(1, waiting=waiting)
    board.wait(seconds, can_apply=can_apply)
    silence = "no worker acknowledged version 1 within 10 s; see GET /v1/workers"
    assert (board.see(1).state, board.see(1).error) == (state, silence if state == "failed" else "")
    if waiting:  # also late
        board.tracker.acknowledged("cpu-0", 1)
        assert (board.see(1).state, board.see(1).error) == ("applied", "")


def test_refusals_are_failures_with_reasons() -> None:
    board = Board()
    board.publish(1)
    board.tracker.refused("cpu-0", 1, "out of memory")
    board.tracker.refused("cpu-1", 1, "out of memory")
    update = board.see(1)
    assert (update.state, update.error, update.workers.failed) == ("failed", "out of memory", 2)


def test_nobody_waits_for_the_dead_and_their_replacements_count() -> None:
    board = Board()
    board.publish(1)
    board.tracker.acknowledged("cpu-0", 1)
    board.tracker.lost("cpu-1")
    assert board.see(1).state == "applied"
    board.tracker.acknowledged("cpu-1", 1)
    assert board.see(1).workers.acked == 2


def test_ids_of_updates_are_those_of_versions() -> None:
    assert version_of(update_id(7)) == 7
    assert [version_of(text) for text in ("7", "u", "u07", "u-1", "u7x", "", "u" + "9" * 30)] == [None] * 7


def test_the_newest_updates_are_told_at_a_glance() -> None:
    board = Board()
    for version in range(1, 6):
        board.publish(version)
    board.clock.now += 0.5
    board.tracker.acknowledged("cpu-0", 5)
    board.tracker.refused("cpu-1", 5, "no memory")
    newest = board.tracker.newest(3)
    assert [(found.version, found.state) for found in newest] == [
        (5, "partially_applied"),
        (4, "superseded"),
        (3, "superseded"),
    ]
    assert (newest[0].workers.acked, newest[0].workers.failed, newest[0].workers.total) == (1, 1, 2)
    assert (newest[0].slowest_ms, newest[1].slowest_ms, newest[1].superseded_by) == (500.0, None, 5)
    assert (list(newest[0].models), newest[0].receipts) == (["policy"], ())


def test_every_result_is_told_once_and_that_of_a_late_one_twice() -> None:
    board = Board()
    board.publish(1)
    board.publish(2)
    board.tracker.acknowledged("cpu-0", 2)
    board.wait(11)
    board.wait(11)
    board.tracker.acknowledged("cpu-1", 2)
    board.publish(3, waiting=())
    board.stage(4)
    board.hand_over(4, applied=("cpu-0", "cpu-1"), waiting=())
    told = [(version, state) for version, state in board.results if version != 3]
    assert told == [(1, "superseded"), (2, "partially_applied"), (2, "applied"), (4, "applied")]


def test_a_receipt_costs_the_same_for_any_number_of_workers_and_updates() -> None:
    def costs(num_workers: int, num_updates: int) -> list[int]:
        board = Board()
        for version in range(1, num_updates + 1):
            board.publish(version, waiting=tuple(f"cpu-{number}" for number in range(num_workers)))
        tracker = board.tracker
        return [
            lines_run(tracker.acknowledged, "cpu-7", num_updates),
            lines_run(tracker.refused, "cpu-8", num_updates, "no memory"),
            lines_run(tracker.lost, "cpu-9"),
            lines_run(tracker.tick, can_apply=True),
            lines_run(tracker.state_of, num_updates),
            lines_run(tracker.newest, 3),
        ]

    assert costs(2000, 3) == costs(10, 3) == costs(10, 300)
