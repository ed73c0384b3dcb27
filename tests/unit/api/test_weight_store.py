"""Kept weights: whole versions or none, the newest of each model, over restarts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from cormorant_api.errors import StoreError
from cormorant_api.weights.store import StoredModel, StoredVersion, WeightStore, digest_of
from cormorant_worker.normalize.moments import RunningMoments, Statistics


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
        store.remove(store.accept(store.write(stored)))
        store.keep(stored.version)
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


def test_a_version_is_the_next_heads_once_it_was_accepted(tmp_path: Path) -> None:
    store = put(WeightStore(tmp_path, keeps=1), version(3, policy=b"policy-3"))
    written = store.write(version(4, policy=b"policy-4"))
    assert read(store) == b"policy-3", "the version before it is not dropped for it"
    store.accept(written)
    assert read(store) == b"policy-4"
    shutil.copytree(tmp_path / "weights", tmp_path / "next" / "weights")
    assert WeightStore(tmp_path / "next", keeps=5).newest == 3
    store.keep(4)
    assert read(WeightStore(tmp_path, keeps=5)) == b"policy-4"


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
