"""SAC on Pendulum into TorchRL's replay buffer (pip install torchrl): python examples/short/sac.py."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import cormorant
from cormorant.postproc import frames_of


def main(frames: int = 6_000) -> float:
    """Learn while workers collect; returns the mean return of ten episodes."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"], out_keys=["action"], distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0}, spec=Bounded(-2.0, 2.0, (1,)),
        default_interaction_type="random",
    )  # fmt: skip
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[256]), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
    with cormorant.open_fleet(
        env="Pendulum-v1", policy=actor, num_envs=4, workers=1, frames_per_batch=64, total_frames=frames,
        init_random_frames=1_000,
    ) as fleet:  # fmt: skip
        for batch in fleet.batches():
            buffer.extend(frames_of(batch).exclude("loc", "scale", "collector"))
            for _ in range(64):
                losses = loss(buffer.sample())
                optimizer.zero_grad()
                (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
                optimizer.step()
                target.step()
            fleet.publish(actor)
    table = cormorant.evaluate(env="Pendulum-v1", policy=actor, episodes=10, deterministic=True, workers=1)
    mean: float = table.summary["return"]["mean"]
    return mean


if __name__ == "__main__":
    print(f"mean return {main():.1f}")
