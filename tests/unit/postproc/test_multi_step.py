import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import MultiStep, PostprocError
from cormorant_testing.postproc_oracle import Row, look_ahead, rows, to_batch

GAMMAS = st.sampled_from([0.5, 0.9, 1.0])


@given(found=rows(), n=st.integers(1, 14), gamma=GAMMAS, feature=st.booleans())
@settings(max_examples=80)
def test_every_target_is_what_a_loop_over_the_frames_makes(
    found: list[Row], n: int, gamma: float, feature: bool
) -> None:
    batch = to_batch(found, feature=feature)
    before = batch.clone()
    result = MultiStep(gamma=gamma, n_steps=n)(batch)
    for b, row in enumerate(found):
        for t, frame in enumerate(row):
            k = look_ahead(row, t, n)
            target = row[t + k - 1]
            summed = sum(gamma**i * row[t + i].reward for i in range(k))
            assert float(result["next", "reward"][b, t]) == pytest.approx(summed, abs=1e-9)
            assert float(result["next", "original_reward"][b, t]) == frame.reward
            assert result["next", "observation"][b, t].tolist() == [target.following, -target.following]
            for name in ("done", "terminated", "truncated"):
                assert bool(result["next", name][b, t]) == getattr(target, name)
            assert int(result["steps_to_next_obs"][b, t]) == k
            assert float(result["gamma"][b, t]) == pytest.approx(gamma**k)
            assert bool(result["nonterminal"][b, t]) is not target.terminated
        for t in range(len(row), batch.shape[1]):
            assert not result["nonterminal"][b, t]
            assert float(result["next", "reward"][b, t]) == 0
    assert (batch == before).all()  # nothing in place
    assert (result["observation"] == before["observation"]).all()


def test_several_batch_dimensions_and_rewards_of_several_agents() -> None:
    reward = torch.arange(2 * 3 * 5 * 2, dtype=torch.float32).reshape(2, 3, 5, 2)
    done = torch.zeros(2, 3, 5, 1, dtype=torch.bool)
    done[:, :, 2] = True
    step = MultiStep(gamma=1.0, n_steps=2)
    assert step.to("cpu") is step, "as scripts move TorchRL's"
    result = step(TensorDict({"next": {"reward": reward, "done": done}}, batch_size=[2, 3, 5]))
    expected = reward.clone()
    for t in (0, 1, 3):
        expected[:, :, t] += reward[:, :, t + 1]
    assert torch.equal(result["next", "reward"], expected)


def test_bad_arguments_and_batches_are_refused_by_a_sentence() -> None:
    for gamma in (0.0, 1.1, float("nan")):
        with pytest.raises(PostprocError, match=f"gamma {gamma} is out of range"):
            MultiStep(gamma=gamma, n_steps=3)
    for n_steps in (0, 1.5):
        with pytest.raises(PostprocError, match=f"n_steps {n_steps} is not a number of steps"):
            MultiStep(gamma=0.9, n_steps=n_steps)  # type: ignore[arg-type]  # a script's mistake
    with pytest.raises(PostprocError, match=r"the batch has no next\.done; it has \['next\.reward'\]"):
        MultiStep(0.9, 2)(TensorDict({"next": {"reward": torch.ones(4)}}, batch_size=[4]))
    following = {"reward": torch.ones(4, 3), "done": torch.zeros(4, 3, 2, dtype=torch.bool)}
    with pytest.raises(PostprocError, match=r"next\.done has shape \[4, 3, 2\]"):
        MultiStep(0.9, 2)(TensorDict({"next": following}, batch_size=[4, 3]))


@pytest.mark.gpu
def test_the_gpu_gives_what_the_cpu_gives() -> None:
    done = torch.rand(8, 50, 1) < 0.1
    batch = TensorDict(
        {"next": {"reward": torch.randn(8, 50, 1), "done": done, "terminated": done}}, batch_size=[8, 50]
    )
    here, there = MultiStep(0.9, 5)(batch), MultiStep(0.9, 5)(batch.to("cuda")).cpu()
    for key in here.keys(True, True):
        torch.testing.assert_close(here[key], there[key])
