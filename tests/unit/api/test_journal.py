"""What a head tells the next one, and what scrapers were told: neither goes back."""

from pathlib import Path

from cormorant_api.journal import Journal


def test_frames_that_were_exported_are_the_floor_of_the_next_head(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.settle(100)
    first.note_exported(250)
    first.note_exported(240)
    first.close()
    second = Journal(tmp_path)
    assert (second.frames, second.exported_frames) == (100, 250)
    second.note_exported(120)  # what was not settled is collected again
    second.close()
    assert Journal(tmp_path).exported_frames == 250


def test_a_head_without_a_folder_begins_at_the_floor_that_it_is_told() -> None:
    journal = Journal(None, floor_frames=77)
    journal.note_exported(80)
    journal.close()
    assert (journal.frames, journal.exported_frames) == (77, 80)


def test_a_folder_of_a_head_that_exported_nothing_is_taken(tmp_path: Path) -> None:
    (tmp_path / "frames").write_text(f"{5:020d}")
    assert Journal(tmp_path).exported_frames == 5
