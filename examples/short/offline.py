"""Collect a dataset, read it back, and clone the better half of its episodes: python examples/short/offline.py."""

import tempfile

import torch

import cormorant
from cormorant.policies import mlp

JOB = {
    "apiVersion": "cormorant.dev/v1alpha1",
    "kind": "CollectorJob",
    "metadata": {"name": "cartpole"},
    "spec": {"env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8}}, "policy": {"random": {}}},
}


def main(folder: str, frames: int = 20_000) -> float:
    """Collect and learn; returns the last loss."""
    torch.manual_seed(0)
    JOB["spec"]["collection"] = {"framesPerBatch": 1024, "totalFrames": frames}
    JOB["spec"]["output"] = {"dataset": {"uri": folder}}
    with cormorant.open_fleet(JOB, workers=1) as fleet:
        assert fleet.wait_until_done(120)
    dataset = cormorant.read_dataset(folder)
    returns = dataset.episodes.to_pandas()["return"]
    print(f"{len(dataset)} frames, {len(returns)} episodes, mean return {returns.mean():.1f}")
    policy = mlp(dataset.info.observation_space, dataset.info.action_space)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for trajectory, total in zip(dataset.trajectories(), returns, strict=True):
        if total >= returns.median():
            log_prob, _ = policy.evaluate(trajectory["observation"], trajectory["action"])
            optimizer.zero_grad()
            loss = -log_prob.mean()
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(f"loss {main(temporary):.3f}")
