import threading

import pytest
import torch

from cormorant_testing.collecting import make_collector
from cormorant_worker.collect.pause_gate import PauseGate, Stopped
from cormorant_worker.errors import StaleWeights, WeightsMismatch
from cormorant_worker.weights.blob import in_models
from cormorant_worker.weights.staged import StagedWeights, specs_of_tensors, verify


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
    gate = PauseGate()
    steps = 0
    done = threading.Event()

    def step() -> None:
        nonlocal steps
        while not done.is_set():
            if gate.is_closed:
                gate.wait_while_paused()
            steps += 1

    thread = threading.Thread(target=step)
    thread.start()
    for _ in range(300):
        gate.pause()
        assert gate.wait_until_paused(10)
        before = steps
        threading.Event().wait(0.0005)
        assert steps == before
        gate.resume()
    done.set()
    gate.resume()
    thread.join()
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
