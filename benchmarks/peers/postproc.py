"""This project's post-processing against TorchRL's, in the peers' interpreter: prints a micro-benchmark's rows."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torchrl.collectors.utils import split_trajectories as theirs_split
from torchrl.data.postprocs import MultiStep as TheirMultiStep

from benchmarks.micro import rows
from cormorant_postproc import MultiStep, split_trajectories

ROWS, STEPS, EPISODE = 64, 1024, 20


def batch_of(num_rows: int, num_steps: int, episode: int) -> TensorDict:
    """A batch as a collector hands it over: views of time-major memory, 4 floats an observation."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(num_steps, num_rows, *shape).transpose(0, 1)

    ids = torch.arange(num_steps).expand(num_rows, num_steps) // episode + num_steps * torch.arange(num_rows)[:, None]
    done = torch.zeros(num_rows, num_steps, 1, dtype=torch.bool)
    done[:, episode - 1 :: episode] = True
    following = {"observation": leaf(4), "reward": leaf(1), "done": done, "terminated": done, "truncated": ~done & done}
    root = {"observation": leaf(4), "action": leaf(), "next": following, "collector": {"traj_ids": ids.contiguous()}}
    return TensorDict(root, batch_size=[num_rows, num_steps])


def measure(*, quick: bool) -> Sequence[dict]:
    batch = batch_of(ROWS, STEPS, EPISODE)
    what = f"[{ROWS}, {STEPS}] of {EPISODE}-step episodes"
    rounds = 2 if quick else 7
    ours, theirs = rows.interleaved(lambda: split_trajectories(batch), lambda: theirs_split(batch), rounds=rounds)
    found = [rows.row(f"split_trajectories {what}, TorchRL / ours", rows.median_ratio(theirs, ours), "x", bar=">= 10")]
    ours, theirs = rows.interleaved(
        lambda: MultiStep(gamma=0.99, n_steps=3)(batch),
        lambda: TheirMultiStep(gamma=0.99, n_steps=3)(batch),
        rounds=rounds,
    )
    found.append(rows.row(f"MultiStep(3) {what}, TorchRL / ours", rows.median_ratio(theirs, ours), "x", bar=">= 3"))
    few, many = (_allocated_bytes(batch_of(ROWS, STEPS, episode)) for episode in (STEPS, EPISODE))
    found.append(rows.row(f"MultiStep memory, {STEPS // EPISODE} episodes a row / 1", many / few, "x", bar="1"))
    return found


def _allocated_bytes(batch: TensorDict) -> int:
    """Bytes that torch allocates for the targets of a batch, over all operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        MultiStep(gamma=0.99, n_steps=3)(batch)
    return sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())


if __name__ == "__main__":
    rows.main(measure)
