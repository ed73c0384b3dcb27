"""What one head leaves the next, and what scrapers were told: exact at any moment, and never less than before."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import structlog

from cormorant_api.control.journal import Journal
from cormorant_api.errors import StoreError
from cormorant_testing.scripts import no_room
from cormorant_worker.normalize import RunningMoments, Statistics


def test_next_head_goes_on_from_what_was_settled(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.settle(100)
    first.note_exported(450)
    first.note_exported(440)
    first.settle(300).result(10)
    # No close: it was killed.
    second = Journal(tmp_path)
    assert (first.epoch, second.epoch, second.frames, second.exported_frames) == (0, 1, 300, 450)
    second.settle(350)
    second.settle(50).result(10)
    second.note_exported(320)  # what was not settled is collected again
    second.close()
    third = Journal(tmp_path)
    assert (second.settled_frames, third.frames, third.exported_frames) == (350, 350, 450)


def test_the_highest_known_count_holds(tmp_path: Path) -> None:
    lost = Journal(tmp_path, epoch=3, floor_frames=1000)
    assert (lost.epoch, lost.frames, lost.settled_frames, lost.exported_frames) == (2, 1000, 1000, 1000)
    again = Journal(tmp_path, floor_frames=7)
    assert (again.epoch, again.frames, again.exported_frames) == (3, 1000, 1000)
    memory = Journal(None, floor_frames=77)
    memory.note_exported(80)
    memory.close()
    assert (memory.frames, memory.exported_frames) == (77, 80)
    (tmp_path / "journal").write_text("what no head wrote")
    with pytest.raises(StoreError, match="cannot use"):
        Journal(tmp_path)


def test_last_words_are_right_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.write_text("what somebody else left there, and longer")
    journal = Journal(None, floor_frames=7, termination_message_file=path)
    assert json.loads(path.read_text()) == {"frames": 7}
    journal.settle(1007).result(10)
    assert json.loads(path.read_text()) == {"frames": 1007}
    journal.explain("no space left " * 1000)
    journal.explain("short")
    assert json.loads(path.read_text()) == {"frames": 1007, "reason": "short"}
    journal.close()
    journal.close()


def test_long_termination_message_keeps_the_count(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    journal = Journal(None, floor_frames=1234567, termination_message_file=path)
    for reason in ("磁盘已满 " * 2000, "\x01\n" * 5000, "a" * 100_000, 'é"' * 3000):
        journal.explain(reason)
        assert path.stat().st_size <= 4096
        words = json.loads(path.read_bytes())
        assert (words["frames"], reason.startswith(words["reason"])) == (1234567, True)
        assert len(words["reason"].encode()) > 600
    journal.close()


def test_statistics_and_their_frames_are_one_file(tmp_path: Path) -> None:
    first, more = (Statistics({"observation": RunningMoments.of(np.array(x))}) for x in ([[0.1], [0.2]], [[0.3]]))
    journal = Journal(tmp_path, floor_frames=10)
    assert journal.statistics is None
    journal.settle(12, first).result(10)
    counts = (tmp_path / "journal").read_bytes()
    # Killed after the file was replaced and before the count was written: both are of the later acknowledgement.
    journal.settle(13, first.merged(more)).result(10)
    (tmp_path / "journal").write_bytes(counts)
    again = Journal(tmp_path)
    assert again.frames == 13
    assert again.statistics is not None
    assert again.statistics.document() == first.merged(more).document()
    (tmp_path / "statistics.json").write_text("{}")
    with pytest.raises(StoreError, match="cannot use"):
        Journal(tmp_path)


@contextmanager
def hanging(journal: Journal) -> Iterator[None]:
    """Inside, the disk does not answer."""
    answered = threading.Event()
    journal._writer.submit(answered.wait)
    try:
        yield
    finally:
        answered.set()


def test_a_full_disk_is_logged_once_and_written_to_when_it_has_room(tmp_path: Path) -> None:
    statistics = Statistics({"observation": RunningMoments.of(np.arange(6.0).reshape(3, 2))})
    journal = Journal(tmp_path)
    size = (tmp_path / "journal").stat().st_size
    with no_room() as logged:
        for frames in (30, 60):
            journal.settle(frames, statistics).result(10)
            journal.note_exported(frames)
            assert journal.settled_frames == frames
    assert sorted(line["event"] for line in logged) == ["frames_not_kept", "statistics_not_kept"]
    assert "File too large; free space on the disk" in logged[0]["reason"]
    assert Journal(tmp_path).frames == 0
    journal.settle(60).result(10)
    again = Journal(tmp_path)
    assert again.frames == 60
    assert again.statistics is not None
    assert (tmp_path / "journal").stat().st_size == size, "a full disk takes every count"


def test_settling_never_waits_and_is_done_once_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with hanging(journal):
        waiting = [journal.settle(10), *(journal.settle(frames) for frames in range(20, 400, 10))]
        assert journal.settled_frames == 390
        assert not any(kept.done() for kept in waiting)
        assert len({id(kept) for kept in waiting}) <= 2, "one write is under way, and the next is for all others"
    for kept in waiting:
        kept.result(10)
    assert journal.settle(390).done()
    assert Journal(tmp_path).frames == 390


def test_frames_are_synced_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(int(os.pread(descriptor, 62, 0).split()[1])))
    journal = Journal(tmp_path)
    journal._sync_at = 0.0
    for frames in (10, 20, 30):
        journal.settle(frames).result(10)
    assert synced == [0, 10], "acknowledgements do not wait for a sync each"
    journal._sync_at = 0.0  # a second has passed
    journal.settle(0).result(10)  # what housekeeping says, without news
    assert synced == [0, 10, 30]
    assert journal.settle(0).done()
    journal.settle(40).result(10)
    journal.close()
    assert synced == [0, 10, 30, 40]


def test_a_disk_that_hangs_holds_up_neither_scrapes_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cormorant_api.control.journal._ANSWER_WITHIN_S", 0.1)
    monkeypatch.setattr("cormorant_api.control.journal._EXPORT_WITHIN_S", 0.1)
    words = tmp_path / "termination-log"
    journal = Journal(tmp_path / "head", termination_message_file=words)
    assert journal.note_exported(10) == 10
    with hanging(journal), structlog.testing.capture_logs() as logged:
        kept = journal.settle(50)
        assert journal.note_exported(60) == 10, "what is exported is on the disk before"
        with pytest.raises(StoreError, match=r"the disk of .*head did not answer within 0 s; retry"):
            journal.reserve_epoch(3)
        journal.explain("the disk hangs")
        assert json.loads(words.read_text())["reason"] == "the disk hangs"
        journal.close()
        journal.close()
    assert [(line["event"], line["reason"]) for line in logged] == [
        ("journal_not_closed", "the disk did not answer within 0 s; 50 frames may be collected again")
    ]
    kept.result(10)
    assert Journal(tmp_path / "head").frames == 50, "it answered after all"


def test_no_later_head_gets_an_epoch_that_a_restored_state_uses(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for epoch in (7, 3):
        journal.reserve_epoch(epoch)
    assert [Journal(tmp_path).epoch, Journal(tmp_path, epoch=4).epoch, Journal(tmp_path).epoch] == [8, 9, 10]
    Journal(None).reserve_epoch(7)
