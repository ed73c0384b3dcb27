"""`multiStep` and `splitTrajectories` of a manifest, as the consumer of a fleet sees them."""

from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import make_fleet
from cormorant_worker.local_fleet import LocalFleet


def test_multi_step_trajectories_count_frames_as_collected() -> None:
    collection = {
        "mode": "sync",
        "framesPerBatch": 20,
        "totalFrames": 80,
        "multiStep": {"steps": 2, "gamma": 0.5},
        "splitTrajectories": True,
    }
    job = make_job(num_envs=2, collection=collection, lengths=(4,))
    frames = 0
    with make_fleet(job, workers=2) as fleet:
        for batch in LocalFleet(fleet).batches():
            mask = batch["collector", "mask"]
            frames += int(mask.sum())
            steps = batch["observation"][..., 2]
            ids = batch["collector", "traj_ids"]
            for row in range(len(batch)):
                length = int(mask[row].sum())
                assert len(set(ids[row, :length].tolist())) == 1
                assert steps[row, :length].tolist() == [steps[row, 0] + t for t in range(length)]
                rewards = batch["next", "original_reward"][row, :length, 0]
                summed = [float(rewards[t] + (0.5 * rewards[t + 1] if t + 1 < length else 0)) for t in range(length)]
                assert batch["next", "reward"][row, :length, 0].tolist() == summed
                assert batch["steps_to_next_obs"][row, :length].tolist() == [2] * (length - 1) + [1]
        assert frames == fleet.stats().frames == 80
