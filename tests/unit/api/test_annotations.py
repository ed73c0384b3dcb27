"""Annotations: one value per key and version, bounded, the same after a restart."""

from pathlib import Path

import pytest

from cormorant_api.errors import ApiError, StoreError
from cormorant_api.weights import annotations
from cormorant_api.weights.annotations import AnnotationStore
from cormorant_contract.rest.problems import ProblemType


def put(store: AnnotationStore, version: int, value: bytes, key: str = "learner", expected: str | None = None) -> str:
    def check(etag: str) -> None:
        if expected is not None and etag != expected:
            raise ApiError(ProblemType.PRECONDITION_FAILED, etag)

    return store.put(key, version, value, author="write@host", check=check).entry.etag


def read(store: AnnotationStore, key: str = "learner") -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at: int | None = None
    while (annotation := store.find(key, at)) is not None:
        found[annotation.entry.version] = annotation.value
        at = annotation.entry.version - 1
    return found


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_last_versions_of_each_key_are_kept(tmp_path: Path, has_folder: bool) -> None:
    store = AnnotationStore(tmp_path if has_folder else None, keeps=2)
    for version in (1, 4, 7):
        put(store, version, b"at-%d" % version)
    put(store, 4, b"other", key="a.b-C_9")
    assert read(store) == {7: b"at-7", 4: b"at-4"}
    assert [a.entry.key for a in store.newest()] == ["a.b-C_9", "learner"]
    found = store.find("learner", 6)
    assert found is not None
    assert found.value == b"at-4", "stored with version 4, the highest up to 6"
    assert store.find("learner", 3) is None
    if has_folder:
        assert sorted(path.name for path in (tmp_path / "annotations").iterdir()) == ["1", "2", "3"]


def test_a_new_store_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    store = AnnotationStore(tmp_path, keeps=3)
    put(store, 1, b"first")
    put(store, 1, b"second\nline")
    put(store, 2, b"")
    put(store, 2, b"gone", key="other")
    assert store.delete("other", check=lambda etag: None)
    again = AnnotationStore(tmp_path, keeps=3)
    assert read(again) == {2: b"", 1: b"second\nline"}
    assert [a.entry for a in again.newest()] == [a.entry for a in store.newest()]
    put(again, 3, b"third")
    assert read(AnnotationStore(tmp_path, keeps=3)) == {3: b"third", 2: b"", 1: b"second\nline"}


def test_a_write_that_was_cut_off_leaves_the_value_before(tmp_path: Path) -> None:
    put(AnnotationStore(tmp_path, keeps=3), 1, b"whole")
    folder = tmp_path / "annotations"
    (folder / ".7.c0ffee.part").write_bytes(b"{")
    (folder / "8").write_bytes((folder / "0").read_bytes().replace(b"whole", b"wrong"))
    (folder / "9").write_bytes(b"nothing")
    again = AnnotationStore(tmp_path, keeps=3)
    assert read(again) == {1: b"whole"}
    assert not (folder / ".7.c0ffee.part").exists()
    put(again, 1, b"newer")
    assert read(AnnotationStore(tmp_path, keeps=3)) == {1: b"newer"}


def test_a_writer_that_has_not_seen_the_newest_value_is_refused(tmp_path: Path) -> None:
    store = AnnotationStore(tmp_path, keeps=3)
    first = put(store, 1, b"one", expected="")
    second = put(store, 2, b"two", expected=first)
    with pytest.raises(ApiError) as refused:
        put(store, 2, b"other", expected=first)
    assert refused.value.detail == second
    assert put(store, 2, b"two", expected=first) == second, "the same request again"
    assert read(store) == {1: b"one", 2: b"two"}


def test_too_many_keys_bytes_and_too_old_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "MAX_ANNOTATION_KEYS", 2)
    monkeypatch.setattr(annotations, "MAX_ANNOTATIONS_BYTES", 10)
    store = AnnotationStore(tmp_path, keeps=2)
    put(store, 5, b"12345")
    put(store, 6, b"1234")
    put(store, 0, b"", key="other")
    with pytest.raises(ApiError, match="2 annotations are stored, the limit is 2; delete one") as refused:
        put(store, 6, b"", key="third")
    assert (refused.value.status, refused.value.kind) == (409, ProblemType.ANNOTATIONS_FULL)
    with pytest.raises(ApiError, match="2 bytes beside the 9 that are stored exceed the limit of 10 bytes"):
        put(store, 1, b"12", key="other")
    with pytest.raises(ApiError, match=r"version 4 of annotation learner is older than the 2 versions .* 5 to 6"):
        put(store, 4, b"")
    put(store, 7, b"123456")  # drops version 5
    assert read(store) == {7: b"123456", 6: b"1234"}


def test_a_disk_that_does_not_take_a_value_changes_nothing(tmp_path: Path) -> None:
    store = AnnotationStore(tmp_path, keeps=2)
    put(store, 1, b"one")
    (tmp_path / "annotations" / "1").mkdir()  # in the way of the next file
    with pytest.raises(StoreError, match=r"cannot store annotation learner in .*; free space on the head's volume"):
        put(store, 2, b"two")
    assert read(store) == {1: b"one"}
    assert not list((tmp_path / "annotations").glob("*.part"))
