"""Kept weights: whole versions or none, the newest of each model, over restarts."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from cormorant_api.errors import StoreError
from cormorant_api.weights.store import StoredModel, StoredVersion, WeightStore, digest_of
from cormorant_worker.normalize.moments import RunningMoments, Statistics

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def version(number: int, **models: bytes) -> StoredVersion:
    stored = {
        name: StoredModel(
            version=number,
            name=name,
            digest=digest_of([memoryview(data)]),
            buffers=(memoryview(data)[:3], memoryview(data)[3:]),
            num_tensors=1,
            published_at=NOW,
            author="write@host",
        )
        for name, data in models.items()
    }
    return StoredVersion(version=number, digest=f"xxh3:{number}", published_at=NOW, author="write@host", models=stored)


def put(store: WeightStore, stored: StoredVersion) -> None:
    store.remove(store.accept(store.write(stored)))
    store.keep(stored.version)


def read(store: WeightStore, model: str, number: int | None = None) -> bytes:
    found = store.model(model, number)
    assert found is not None
    return b"".join(found.buffers)


@pytest.mark.parametrize("has_folder", [True, False])
def test_newest_of_each_model_is_kept_and_old_ones_dropped(tmp_path: Path, has_folder: bool) -> None:
    store = WeightStore(tmp_path if has_folder else None, keeps=2)
    put(store, version(1, policy=b"policy-1", critic=b"critic-1"))
    for number in (2, 3, 7):
        put(store, version(number, policy=b"policy-%d" % number))
    assert store.newest == 7
    assert read(store, "policy") == b"policy-7"
    assert read(store, "critic") == b"critic-1", "its newest, however old"
    assert [model.version for model in store.history("policy")] == [7, 3, 1]
    assert store.model("policy", 2) is None
    if has_folder:
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1", "3", "7"]


def test_a_new_store_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keeps=5)
    put(store, version(3, policy=b"policy-3", **{"../../evil": b"critic-3"}))
    again = WeightStore(tmp_path, keeps=5)
    assert again.newest == 3
    assert read(again, "policy") == b"policy-3"
    assert read(again, "../../evil") == b"critic-3"
    assert {model.author for model in again.current().values()} == {"write@host"}
    assert {path.name for path in tmp_path.rglob("*")} == {
        "weights",
        "3",
        "meta.json",
        "0.safetensors",
        "1.safetensors",
    }


def test_a_version_is_the_next_heads_once_it_was_accepted(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keeps=5)
    put(store, version(3, policy=b"policy-3"))
    store.accept(store.write(version(4, policy=b"policy-4")))
    assert read(store, "policy") == b"policy-4"
    shutil.copytree(tmp_path / "weights", tmp_path / "next" / "weights")
    assert WeightStore(tmp_path / "next", keeps=5).newest == 3
    store.keep(4)
    assert read(WeightStore(tmp_path, keeps=5), "policy") == b"policy-4"


def test_a_write_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    put(WeightStore(tmp_path, keeps=5), version(3, policy=b"policy-3"))
    part = tmp_path / "weights" / "4.part"
    part.mkdir()
    (part / "0.safetensors").write_bytes(b"half")
    assert WeightStore(tmp_path, keeps=5).newest == 3
    assert not part.exists()


@pytest.mark.parametrize("harm", ["bytes", "short", "meta", "no meta", "empty"])
def test_damaged_version_is_skipped_and_may_be_rewritten(tmp_path: Path, harm: str) -> None:
    store = WeightStore(tmp_path, keeps=5)
    put(store, version(3, policy=b"policy-3"))
    put(store, version(4, policy=b"policy-4"))
    folder = tmp_path / "weights" / "4"
    match harm:
        case "bytes":
            (folder / "0.safetensors").write_bytes(b"policy-X")
        case "short":
            (folder / "0.safetensors").write_bytes(b"pol")
        case "empty":
            (folder / "0.safetensors").write_bytes(b"")
        case "meta":
            (folder / "meta.json").write_text(json.dumps({"version": 4}))
        case "no meta":
            (folder / "meta.json").unlink()
    again = WeightStore(tmp_path, keeps=5)
    assert again.newest == 3
    put(again, version(4, policy=b"policy-5"))
    assert read(WeightStore(tmp_path, keeps=5), "policy") == b"policy-5"


def test_what_the_fleet_refused_never_was(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keeps=5)
    put(store, version(3, policy=b"policy-3"))
    store.forget(3)
    assert store.newest == 0
    store.remove([3])
    assert WeightStore(tmp_path, keeps=5).newest == 0


def test_a_reader_keeps_its_bytes_when_the_version_is_dropped(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keeps=1)
    put(store, version(1, policy=b"policy-1"))
    old = store.model("policy")
    assert old is not None
    put(store, version(2, policy=b"policy-2"))
    assert b"".join(old.buffers) == b"policy-1"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(StoreError, match=r"cannot use .*weights to store weights"):
        WeightStore(tmp_path, keeps=1)


def test_a_version_keeps_its_statistics_and_others_say_nothing(tmp_path: Path) -> None:
    statistics = Statistics({"observation": RunningMoments.of(np.array([[0.1], [0.2]]), clip=10.0)})
    store = WeightStore(tmp_path, keeps=5)
    put(store, version(1, policy=b"policy-1"))
    put(store, replace(version(2, policy=b"policy-2"), statistics=statistics))
    assert "statistics" not in json.loads((tmp_path / "weights" / "1" / "meta.json").read_text())
    again = WeightStore(tmp_path, keeps=5)
    found = again.version(2)
    assert found is not None
    assert found.statistics is not None
    assert found.statistics.document() == statistics.document()


def test_version_that_was_not_accepted_is_removed_unseen(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keeps=1)
    put(store, version(1, policy=b"policy-1"))
    store.write(version(2, policy=b"policy-2"))
    assert (store.newest, read(store, "policy")) == (1, b"policy-1"), "the version before it is not dropped for it"
    store.remove([2])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["1"]
