"""Kept weights: whole versions or none, the newest of each model, over restarts. What becomes of a publish: every way
from staged to its end.
"""

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cormorant_api.errors import StoreError
from cormorant_api.weights.publisher import WeightPublisher
from cormorant_api.weights.store import StoredModel, StoredVersion, WeightStore, digest_of
from cormorant_api.weights.updates import UpdateTracker, update_id, version_of
from cormorant_contract.rest.updates import Update
from cormorant_testing.clock import Clock
from cormorant_testing.cost import lines_run
from cormorant_testing.scripted_head import UPDATE
from cormorant_worker.fleet.stats import WorkerReceipts
from cormorant_worker.normalize import RunningMoments, Statistics
from cormorant_worker.weights.staged import PolicyVersion


def version(number: int, **models: bytes) -> StoredVersion:
    stored = {
        name: StoredModel(
            version=number,
            name=name,
            digest=digest_of([memoryview(data)]),
            buffers=(memoryview(data)[:3], memoryview(data)[3:]),
            num_tensors=1,
        )
        for name, data in models.items()
    }
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return StoredVersion(version=number, digest=f"xxh3:{number}", published_at=now, author="write@host", models=stored)


def put(store: WeightStore, *versions: StoredVersion) -> WeightStore:
    for stored in versions:
        store.accept(store.write(stored))
        store.keep(stored.version)
        store.remove(store.prune(stored.version))
    return store


def read(store: WeightStore, model: str = "policy", number: int | None = None) -> bytes:
    found = store.model(model, number)
    assert found is not None
    return b"".join(found.buffers)


@pytest.mark.parametrize("has_folder", [True, False])
def test_newest_of_each_model_is_kept_and_old_ones_dropped(tmp_path: Path, has_folder: bool) -> None:
    store = put(WeightStore(tmp_path if has_folder else None, keeps=2), version(1, policy=b"policy-1", critic=b"one"))
    old = store.model("policy")
    put(store, *(version(number, policy=b"policy-%d" % number) for number in (2, 3, 7)))
    assert (store.newest, read(store), read(store, "critic")) == (7, b"policy-7", b"one"), "its newest, however old"
    assert [stored.version for stored in store.history("policy")] == [7, 3, 1]
    assert store.model("policy", 2) is None
    assert old is not None
    assert b"".join(old.buffers) == b"policy-1", "a reader keeps its bytes"
    if has_folder:
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1", "3", "7"]


def test_a_new_store_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    statistics = Statistics({"observation": RunningMoments.of(np.array([[0.1], [0.2]]), clip=10.0)})
    evil = version(3, policy=b"policy-3", **{"../../evil": b"critic-3"})
    put(WeightStore(tmp_path, keeps=5), evil, replace(version(4, policy=b"policy-4"), statistics=statistics))
    again = WeightStore(tmp_path, keeps=5)
    assert (again.newest, read(again, number=3), read(again, "../../evil")) == (4, b"policy-3", b"critic-3")
    first, second = again.version(3), again.version(4)
    assert first is not None
    assert second is not None
    assert (first.author, first.statistics) == ("write@host", None)
    assert second.statistics is not None
    assert second.statistics.document() == statistics.document()
    names = {"weights", "3", "4", "meta.json", "0.safetensors", "1.safetensors"}
    assert {path.name for path in tmp_path.rglob("*")} == names


def test_durable_weights_stay_while_no_newer_ones_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    store = put(WeightStore(tmp_path, keeps=1), version(3, policy=b"policy-3"))
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", refuse)
        for number in (4, 5):
            store.accept(store.write(version(number, policy=b"policy-%d" % number)))
            with pytest.raises(StoreError, match=rf"could not keep weights version {number}: .*Input/output error"):
                store.keep(number)
            store.remove(store.prune(number))
    assert (store.versions, read(store)) == ([3, 5], b"policy-5")
    shutil.copytree(tmp_path / "weights", tmp_path / "next" / "weights")
    assert read(WeightStore(tmp_path / "next", keeps=1)) == b"policy-3"
    assert put(store, version(6, policy=b"policy-6")).versions == [6]
    for number in range(7, 12):  # kept, but later than the publish waits
        store.accept(store.write(version(number, policy=b"policy")))
        store.remove(store.prune(number))
        store.keep(number)
    assert store.versions == [10, 11]


def test_hung_disk_does_not_gather_the_bytes_of_refused_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    thawed, store = threading.Event(), WeightStore(None, keeps=1)
    monkeypatch.setattr(store, "write", lambda _: thawed.wait(60))
    nothing: Any = None
    publisher = WeightPublisher(nothing, store, nothing, nothing, nothing)
    monkeypatch.setattr(publisher, "within_s", 0.05)

    def refused(number: int) -> weakref.ref[memoryview]:
        stored = version(number, policy=b"policy")
        with pytest.raises(StoreError, match="the disk did not answer within 0 s"):
            publisher._put(stored)
        return weakref.ref(stored.models["policy"].buffers[0])

    try:
        bodies = [refused(number) for number in (1, 2, 3)]
        gc.collect()
        assert [body() is None for body in bodies] == [False, True, True], "the one that is written stays"
    finally:
        thawed.set()


def test_what_was_cut_off_or_refused_never_was(tmp_path: Path) -> None:
    store = put(WeightStore(tmp_path, keeps=5), version(3, policy=b"policy-3"), version(4, policy=b"policy-4"))
    store.forget(4)
    assert store.newest == 3
    store.write(version(5, policy=b"policy-5"))
    store.remove([4, 5])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["3"]
    part = tmp_path / "weights" / "4.part"
    part.mkdir()
    (part / "0.safetensors").write_bytes(b"half")
    assert WeightStore(tmp_path, keeps=5).newest == 3
    assert not part.exists()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "0.safetensors").write_bytes(b"policy-X"),
        lambda folder: (folder / "0.safetensors").write_bytes(b"pol"),
        lambda folder: (folder / "meta.json").write_text(json.dumps({"version": 4})),
    ],
    ids=["bytes", "short", "meta"],
)
def test_damaged_version_is_skipped_and_may_be_rewritten(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    put(WeightStore(tmp_path, keeps=5), version(3, policy=b"policy-3"), version(4, policy=b"policy-4"))
    harm(tmp_path / "weights" / "4")
    again = WeightStore(tmp_path, keeps=5)
    assert again.newest == 3
    put(again, version(4, policy=b"policy-5"))
    assert read(WeightStore(tmp_path, keeps=5)) == b"policy-5"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(StoreError, match=r"cannot use .*weights to store weights"):
        WeightStore(tmp_path, keeps=1)


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
        named = {"version": version, "update_id": update_id(version), "models": models or ("policy",)}
        self.tracker.stage(Update.model_validate({**UPDATE, **named}), received=self.clock.now)

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


def test_a_word_that_comes_before_the_hand_over_is_not_lost() -> None:
    board = Board()
    board.stage(1)
    board.tracker.acknowledged("cpu-0", 1)
    assert board.see(1).state == "staged", "the other worker is not known yet"
    board.hand_over(1, waiting=("cpu-0", "cpu-1"))
    assert (board.see(1).state, board.results) == ("applying", [])
    board.clock.now += 0.5
    board.tracker.acknowledged("cpu-1", 1)
    update = board.see(1)
    assert (update.state, update.workers.total, update.workers.acked) == ("applied", 2, 2)
    assert (update.receipts[1].latency_ms, update.timings.apply_ms) == (500.0, 500.0)


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
    assert [version_of(text) for text in ("7", "u", "u07", "u-1", "u7x", "", "u" + "9" * 30)] == [0] * 7


def test_the_newest_updates_are_told_at_a_glance() -> None:
    board = Board()
    for version in range(1, 6):
        board.publish(version)
    board.clock.now += 0.5
    board.tracker.refused("cpu-0", 5, "no memory")
    board.tracker.refused("cpu-1", 5, "no memory")
    assert (board.see(5).state, board.see(5).error) == ("failed", "no memory")
    board.tracker.acknowledged("cpu-0", 5)
    newest = board.tracker.newest(3)
    assert [(found.version, found.state) for found in newest] == [
        (5, "partially_applied"),
        (4, "superseded"),
        (3, "superseded"),
    ]
    assert (newest[0].workers.acked, newest[0].workers.failed, newest[0].workers.total) == (1, 1, 2)
    assert (newest[0].slowest_ms, newest[1].slowest_ms, newest[1].superseded_by) == (500.0, None, 5)
    assert (newest[0].models, newest[0].receipts) == (("policy",), ())


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
