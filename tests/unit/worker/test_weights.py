"""Weights: staged and applied at once or not at all, as one file in shared memory, and kept in a pod for the next
head.
"""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from cormorant_contract.tensor_file import make_header
from cormorant_testing.collecting import make_collector
from cormorant_testing.scripts import Repeated
from cormorant_worker.collect.pause_gate import PauseGate, Stopped
from cormorant_worker.errors import MalformedWeights, StaleWeights, WeightsError, WeightsMismatch
from cormorant_worker.normalize import RunningMoments, Statistics
from cormorant_worker.weights.blob import WeightsBlob, in_models, read_weights, to_bytes
from cormorant_worker.weights.cached import CachedWeights, Offer, Settled, read_cached
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights, specs_of_tensors, verify

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def slot_of(*widths: int) -> tuple[StagedWeights, dict[str, torch.nn.Module]]:
    modules = {f"m{i}" if i else "policy": torch.nn.Linear(2, width) for i, width in enumerate(widths)}
    return StagedWeights(modules), modules


def filled(module: torch.nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in module.state_dict().items()}


def test_impossible_publishes_are_refused() -> None:
    slot, modules = slot_of(3)
    with pytest.raises(WeightsMismatch, match=r"whose models are \['policy'\]: unexpected: actor/"):
        slot.offer({"actor": filled(modules["policy"], 1.0)}, version=1)
    with pytest.raises(WeightsMismatch, match="no model was given"):
        slot.offer({}, version=1)
    with pytest.raises(WeightsMismatch, match="the policy has no weights"):
        verify({"policy": {}}, {})
    specs = specs_of_tensors({"policy": {"w": torch.zeros(2)}})
    with pytest.raises(WeightsMismatch, match="unexpected: typo"):
        verify({**specs, "typo": {}}, specs)
    with pytest.raises(WeightsError, match=r"policy/a is torch.complex128, which safetensors cannot hold"):
        WeightsBlob.of({"policy": {"a": torch.ones(1, dtype=torch.complex128)}})


def test_several_models_are_applied_together_or_not_at_all() -> None:
    slot, modules = slot_of(3, 4)
    before = slot.current()
    bad = {"weight": torch.ones(3, 2), "extra": torch.zeros(1)}
    with pytest.raises(WeightsMismatch, match=r"missing: policy/bias; unexpected: policy/extra; nothing was applied"):
        slot.offer({"policy": bad, "m1": filled(modules["m1"], 1.0)}, version=1)
    assert slot.apply() == slot.version == 0
    for name, module in modules.items():
        assert all(torch.equal(before[name][key], tensor) for key, tensor in module.state_dict().items())
    slot.offer({name: filled(module, 2.0) for name, module in modules.items()}, version=2)
    assert slot.version == 0
    assert slot.apply() == slot.version == 2
    assert all((t == 2.0).all() for module in modules.values() for t in module.state_dict().values())


def test_newest_offer_wins_and_keeps_models_it_does_not_name() -> None:
    slot, modules = slot_of(3, 4)
    slot.offer({"policy": filled(modules["policy"], 1.0), "m1": filled(modules["m1"], 1.0)}, version=1)
    slot.offer({"policy": filled(modules["policy"], 5.0)}, version=5)
    for version in (5, 4, 1):
        with pytest.raises(StaleWeights, match=f"version {version} is not newer than 5"):
            slot.offer({"policy": filled(modules["policy"], 9.0)}, version=version)
    assert slot.apply() == 5
    assert (modules["policy"].bias == 5.0).all()
    assert (modules["m1"].bias == 1.0).all()
    with pytest.raises(StaleWeights, match="version 5 is not newer than 5"):
        slot.offer({"policy": filled(modules["policy"], 9.0)}, version=5)


def test_who_waits_for_an_offer_sees_it_come() -> None:
    slot, modules = slot_of(3)
    assert slot.wait_until_offered(0, 0.0)
    assert not slot.wait_until_offered(1, 0.0)
    thread = threading.Thread(target=lambda: slot.offer({"policy": filled(modules["policy"], 1.0)}, version=2))
    thread.start()
    assert slot.wait_until_offered(1, 10.0)
    thread.join()
    slot.apply()
    assert slot.wait_until_offered(2, 0.0)
    with pytest.raises(WeightsMismatch):  # a refused one holds nobody up
        slot.offer({"policy": {}}, version=4)
    assert slot.wait_until_offered(4, 0.0)
    assert not slot.wait_until_offered(5, 0.0)
    assert slot.apply() == 2


def test_paused_is_true_even_after_a_short_resume() -> None:
    gate, steps = PauseGate(), list[None]()

    def step() -> None:
        if gate.is_closed:
            gate.wait_while_paused()
        steps.append(None)

    with Repeated(step, every_s=0):
        for _ in range(300):
            gate.pause()
            assert gate.wait_until_paused(10)
            before = len(steps)
            time.sleep(0.0005)
            assert len(steps) == before
            gate.resume()
    assert not gate.is_closed
    assert not gate.wait_until_paused(0)


def test_a_stopped_gate_ends_the_batch_shut_or_open() -> None:
    gate = PauseGate()
    gate.pause()
    gate.stop()
    with pytest.raises(Stopped):
        gate.wait_while_paused()
    gate.resume()
    assert gate.is_closed
    collector = make_collector()
    collector.gate.stop()
    with pytest.raises(Stopped):
        collector.collect(num_steps=3)
    assert int(collector.pulse[0]) == 0


class Remembering(torch.nn.Module):
    """Has an extra state, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.seen = {"steps": 7}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def test_an_extra_state_is_no_weight_and_stays() -> None:
    outer = torch.nn.ModuleDict({"inner": Remembering()})
    slot = StagedWeights({"policy": outer})
    assert sorted(slot.specs["policy"]) == ["inner.layer.bias", "inner.layer.weight"]
    given = in_models({name: torch.ones_like(value) for name, value in slot.current()["policy"].items()})
    assert in_models({**given["policy"], "inner._extra_state": {"steps": 9}}).keys() == {"policy"}
    slot.offer(given, version=1)
    slot.apply()
    assert outer["inner"].layer.bias.tolist() == [1, 1, 1]
    assert outer["inner"].seen == {"steps": 7}


def received(data: bytes, default_model: str = "policy") -> WeightsBlob:
    """What the head does with a request's body."""
    blob = WeightsBlob(len(data))
    blob.buffer[:] = data
    return blob.check(default_model)


def test_blob_reads_back_in_the_reference_library() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).T
    tied = torch.ones(3)
    weights = {
        "policy": {"transposed": transposed, "tied": tied, "again": tied, "one": torch.tensor(3.0)},
        "critic": {"empty": torch.zeros(0, 4), **{str(d): torch.arange(5).to(d) for d in DTYPES}},
    }
    blob = WeightsBlob.of(weights)
    for found in (blob.weights(), received(bytes(blob.buffer)).weights(), read_weights(memoryview(to_bytes(weights)))):
        assert {m: set(t) for m, t in found.items()} == {m: set(t) for m, t in weights.items()}
        for model, tensors in weights.items():
            for name, tensor in tensors.items():
                theirs = found[model][name]
                assert theirs.dtype == tensor.dtype, name
                assert theirs.shape == tensor.shape
                assert theirs.tolist() == tensor.tolist(), name
    reference = safetensors.torch.load(bytes(blob.buffer))
    assert torch.equal(reference["policy/transposed"], transposed)
    assert len(reference) == 4 + 1 + len(DTYPES)
    assert blob.specs == specs_of_tensors(weights)


def test_tensors_are_views_that_keep_their_memory_alive() -> None:
    def descriptors() -> int:
        gc.collect()
        return psutil.Process().num_fds()

    before = descriptors()
    blob = received(safetensors.torch.save({"a": torch.ones(1000)}))
    view = blob.weights()["policy"]["a"]
    blob.buffer[-4:] = bytes(4)
    assert view[-1] == 0  # the same memory
    del blob
    gc.collect()
    assert view.sum() == 999
    assert descriptors() > before
    del view
    assert descriptors() == before


def test_plain_names_are_the_default_models() -> None:
    data = safetensors.torch.save({"weight": torch.ones(2), "policy/weight": torch.zeros(2)})
    blob = received(data, "critic")
    assert {model: set(names) for model, names in blob.tensors.items()} == {"critic": {"weight"}, "policy": {"weight"}}
    assert read_weights(memoryview(data), default_model="critic", models=["critic"])["critic"]["weight"].sum() == 2
    with pytest.raises(MalformedWeights, match="the weights contain policy/weight twice"):
        received(data)


def test_tensors_at_odd_offsets_are_read_all_the_same() -> None:
    header, _ = make_header([("a", "U8", (3,)), ("b", "F64", (2,))])
    data = header + bytes([1, 2, 3]) + torch.tensor([1.5, -2.5], dtype=torch.float64).numpy().tobytes()
    assert received(data).weights()["policy"]["b"].tolist() == [1.5, -2.5]
    shifted = bytearray(1) + bytearray(data)  # as a view of others' memory may be
    assert read_weights(memoryview(shifted)[1:])["policy"]["b"].tolist() == [1.5, -2.5]


def test_the_header_alone_tells_what_does_not_fit() -> None:
    specs = StagedWeights({"policy": torch.nn.Linear(2, 3)}).specs
    fits = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    verify(WeightsBlob.of({"policy": fits}).specs, specs)
    wrong = {"weight": torch.ones(2, 3), "extra": torch.ones(1), "bias": torch.ones(3, dtype=torch.float64)}
    words = (
        r"3 tensors .*: unexpected: policy/extra; shape: policy/weight is \[2, 3\], not \[3, 2\]; .* is float64, not"
    )
    with pytest.raises(WeightsMismatch, match=words):
        verify(WeightsBlob.of({"policy": wrong}).specs, specs)
    many = {f"t{i}": torch.ones(1) for i in range(30)}
    with pytest.raises(WeightsMismatch, match=r"32 tensors do not fit.* and 12 more; nothing was applied"):
        verify(WeightsBlob.of({"policy": many}).specs, specs)


def keep(kept: CachedWeights, version: int, *models: str, text: str = "", statistics: Statistics | None = None) -> None:
    data = memoryview((text or f"bytes of {version}").encode())
    offer = Offer(version=PolicyVersion(version), default_model=models[0], models=models, statistics=statistics)
    kept.keep(offer, data)


def read(kept: CachedWeights) -> list[tuple[int, str, str]]:
    return [(offer.version, offer.default_model, bytes(file).decode()) for offer, file in read_cached(kept.read())]


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_newest_publish_of_each_model_outlives_the_actor(tmp_path: Path, is_stuck: bool) -> None:
    kept, old = CachedWeights(tmp_path / "kept"), tmp_path / "kept" / "3.weights"
    assert (kept.version, read(kept)) == (0, [])
    statistics = Statistics({"observation": RunningMoments.of(np.array([[0.1], [0.2]]), clip=10.0)})
    keep(kept, 1, "policy", "critic", statistics=statistics)
    keep(kept, 3, "critic")
    if is_stuck:  # it cannot be dropped
        old.unlink()
        old.mkdir()
    keep(kept, 12, "critic")
    keep(kept, 12, "critic", text="as a new head put it together")
    for one in (kept, CachedWeights(tmp_path / "kept")):
        assert (one.version, read(one)) == (12, [(1, "policy", "bytes of 1"), (12, "critic", "bytes of 12")])
    assert old.exists() == is_stuck
    ((first, _), _) = read_cached(kept.read())
    assert first.statistics is not None
    assert first.statistics.document() == statistics.document()


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
