"""What a pod keeps for the next head."""

from pathlib import Path

import numpy as np
import pytest

from cormorant_worker.errors import MalformedWeights
from cormorant_worker.normalize.moments import RunningMoments, Statistics
from cormorant_worker.weights.cached import CachedWeights, Offer, Settled, read_cached
from cormorant_worker.weights.staged import PolicyVersion


def keep(kept: CachedWeights, version: int, *models: str, text: str = "") -> None:
    data = memoryview((text or f"bytes of {version}").encode())
    kept.keep(Offer(version=PolicyVersion(version), default_model=models[0], models=models), data)


def read(kept: CachedWeights) -> list[tuple[int, str, str]]:
    return [(offer.version, offer.default_model, bytes(file).decode()) for offer, file in read_cached(kept.read())]


def test_the_newest_publish_outlives_the_actor(tmp_path: Path) -> None:
    kept = CachedWeights(tmp_path / "kept")
    assert (kept.version, read(kept)) == (0, [])
    keep(kept, 3, "policy")
    keep(kept, 12, "policy")
    again = CachedWeights(tmp_path / "kept")
    assert (again.version, read(again)) == (12, [(12, "policy", "bytes of 12")])
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["12.weights"]


def test_statistics_are_kept_with_the_weights_that_act_with_them(tmp_path: Path) -> None:
    statistics = Statistics({"observation": RunningMoments.of(np.array([[0.1], [0.2]]), clip=10.0)})
    offer = Offer(version=PolicyVersion(4), default_model="policy", models=("policy",), statistics=statistics)
    CachedWeights(tmp_path).keep(offer, memoryview(b"bytes"))
    ((found, _),) = read_cached(CachedWeights(tmp_path).read())
    assert found.statistics is not None
    assert found.statistics.document() == statistics.document()


def test_of_several_models_the_newest_of_each_is_kept_as_it_was_published(tmp_path: Path) -> None:
    kept = CachedWeights(tmp_path)
    keep(kept, 1, "policy", "critic")
    keep(kept, 2, "critic")
    keep(kept, 9, "critic")
    keep(kept, 9, "critic", text="as a new head put it together")
    assert read(kept) == [(1, "policy", "bytes of 1"), (9, "critic", "bytes of 9")]


@pytest.mark.parametrize("below", ["", "file"])
def test_no_folder_and_a_disk_that_does_not_take_it_harm_nothing(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = CachedWeights(tmp_path / below / "kept" if below else None)
    keep(kept, 5, "policy")
    assert (kept.version, read(kept)) == (0, [])


def test_half_a_file_and_strangers_are_left_out(tmp_path: Path) -> None:
    keep(CachedWeights(tmp_path), 5, "policy")
    (tmp_path / "6.part").write_bytes(b"half")
    (tmp_path / "7.weights").write_bytes(b"\x08\0\0\0\0\0\0\0no json")
    assert CachedWeights(tmp_path).version == 5


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d[:-1] + b"x", lambda d: d + b"more", lambda d: d[3:]])
def test_what_is_not_as_it_was_kept_is_refused(tmp_path: Path, change: object) -> None:
    kept = CachedWeights(tmp_path)
    keep(kept, 5, "policy")
    assert callable(change)
    with pytest.raises(MalformedWeights, match="cannot read the weights cached from an earlier head"):
        read_cached(change(kept.read()))


def test_count_is_kept_until_a_head_settles_more(tmp_path: Path) -> None:
    CachedWeights(tmp_path).keep_settled(Settled(epoch=1, frames=1000))
    # A head tells its own, older count before this worker is ready, and dies.
    again = CachedWeights(tmp_path)
    again.keep_settled(Settled(epoch=2, frames=500))
    assert CachedWeights(tmp_path).settled == Settled(epoch=1, frames=1000)
    again.keep_settled(Settled(epoch=2, frames=1200))
    assert CachedWeights(tmp_path).settled == Settled(epoch=2, frames=1200)
