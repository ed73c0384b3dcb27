"""Stragglers of a sync round hand over what they have; the total stays exact."""

import pytest

from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.fleets import make_fleet, on_all_placements_slowly
from cormorant_worker.collect.seeding import SeedPath


@on_all_placements_slowly
@pytest.mark.parametrize("policy", ["counter"])
def test_straggler_hands_over_and_the_total_is_exact(policy: str) -> None:
    slow = {"how": "slow", "seconds": 0.02, "seeds": SeedPath(seed=7, index=1).env_seeds(2)}
    job = make_job(
        num_envs=2,
        policy=policy,
        lengths=(3, 8),
        failures=[slow],
        collection={"mode": "sync", "framesPerBatch": 200, "totalFrames": 3000, "preemptiveThreshold": 0.5},
    )
    checker = make_checker(2, lengths=(3, 8))
    shares: list[dict[str, int]] = []
    with make_fleet(job, workers=2) as fleet:
        while (loan := fleet.borrow(timeout_s=120)) is not None:
            with loan:
                checker.take(loan.tensordict())
                shares.append({part.worker: part.block.num_frames for part in loan.parts})
                assert loan.num_frames == sum(shares[-1].values())
                assert min(shares[-1].values()) >= 1
        stats = fleet.stats()
    assert checker.frames == stats.frames == stats.stepped_frames == 3000
    assert stats.dropped == {}
    # A vector step of the second worker takes 40 ms, a whole batch of it four seconds.
    first, second = (sum(share.get(worker, 0) for share in shares) for worker in ("cpu-0", "cpu-1"))
    assert first > second
    # Both are in every round, but for some of the last, which have a single frame.
    assert all(len(share) == 2 for share in shares[:5])
    assert any(share["cpu-1"] < 200 for share in shares[:5])
