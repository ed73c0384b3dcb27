"""Connect Four by self-play: a network learns against its own earlier versions, in a few minutes.

    python examples/self_play.py

Two worker processes play EnvPool's ConnectFour-v1. One player has the newest version of the network; the other draws
one of the last 50 for each game, half of the time the newest. This process learns by PPO from what the newest version
did. Every 20 updates, `evaluate` plays games against random moves, and against the network of 40 updates ago.
"""

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cormorant import evaluate, open_fleet

ENV = {"envpool": {"taskId": "ConnectFour-v1", "numEnvs": 64, "groups": "perAgent"}}
PLAYERS = ("player_0", "player_1")
LEARNER = {"entrypoint": "self_play:Network"}
UPDATES, MATCH_EVERY, GAMES = 100, 20, 200
GAMMA, LAMBDA = 0.95, 0.9


class Network(nn.Module):
    """Which column to play, and how the game will end: -1 to 1, for the player whose view a position is."""

    def __init__(self, observation: Any = None, action: Any = None) -> None:
        super().__init__()
        four_by_four = nn.Sequential(nn.Conv2d(2, 64, 4), nn.ReLU(), nn.Flatten())
        self.trunk = nn.Sequential(four_by_four, nn.Linear(64 * 12, 128), nn.ReLU())
        self.column, self.value = nn.Linear(128, 7), nn.Linear(128, 1)

    def judge(self, observation: Tensor, action_mask: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        """Of `[n, 6, 7, 2]` and `[n, 7]`: the moves, and values `[n]`."""
        features = self.trunk(observation.permute(0, 3, 1, 2).float())
        logits = self.column(features).masked_fill(~action_mask, -1e8)
        return torch.distributions.Categorical(logits=logits), self.value(features).squeeze(-1)

    def forward(self, seen: Any) -> dict[str, Tensor]:
        """Act for one player of each game."""
        moves, _ = self.judge(seen["observation"], seen["action_mask"])
        action = moves.sample()
        return {"action": action, "action_log_prob": moves.log_prob(action)}


def advantages(batch: Any, network: Network) -> tuple[Tensor, Tensor]:
    """Generalized advantages and targets of the value, [B, T, 2]: each player has a view and a reward in every turn."""
    with torch.no_grad():
        views = [both(where, key) for where in (batch, batch["next"]) for key in ("observation", "action_mask")]
        shape, flat = views[0].shape[:3], [view.flatten(0, 2) for view in views]
        now, following = (network.judge(*part)[1].view(shape) for part in (flat[:2], flat[2:]))
    reward, done, terminated = (both(batch["next"], key).squeeze(-1) for key in ("reward", "done", "terminated"))
    delta = reward + GAMMA * following * ~terminated - now
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + GAMMA * LAMBDA * running * ~done[:, t]
        advantage[:, t] = running
    return advantage, advantage + now


def both(where: Any, key: str) -> Tensor:
    """A key of both players, [B, T, 2, ...]."""
    return torch.cat([where[player, key] for player in PLAYERS], 2)


def learn(batch: Any, network: Network, optimizer: torch.optim.Optimizer) -> None:
    """One update of PPO, from all that the newest version did: moves from its turns, values from its view of every
    turn.
    """
    versions = torch.stack([batch["collector", player, "policy_version"] for player in PLAYERS], -1)
    is_newest = (versions == versions.max()).flatten()
    keys = ("observation", "action_mask", "action", "action_log_prob", "mask")
    views = {key: both(batch, key).flatten(0, 2)[is_newest] for key in keys}
    advantage, target = (values.flatten()[is_newest] for values in advantages(batch, network))
    own = advantage[views["mask"]]
    advantage = (advantage - own.mean()) / (own.std() + 1e-8)
    for part in torch.randperm(len(advantage)).repeat(4).split(2048):
        moves, value = network.judge(views["observation"][part], views["action_mask"][part])
        ratio = (moves.log_prob(views["action"][part]) - views["action_log_prob"][part]).exp()
        gain = torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]) + 0.03 * moves.entropy()
        error = (value - target[part]).square().mean()
        optimizer.zero_grad()
        (0.5 * error - gain[views["mask"][part]].mean()).backward()
        optimizer.step()


def share_of_wins(files: list[Path], opponent: dict[str, Any], games: int) -> float:
    """The share of games that the first file wins; a draw counts one half. It plays as player_0 against `opponent`, or
    on both sides against the second file.
    """
    agents = dict(zip(PLAYERS, (LEARNER, opponent), strict=True))
    table = evaluate(env=ENV, policy={"agents": agents}, weights=[*files], episodes=games, workers=2)
    returns: list[float] = []
    for episode in table.episodes:
        file_of = json.loads(episode.checkpoint)  # by player, without random ones
        if len({*file_of.values()}) == len(file_of):
            returns += [episode.returns[player] for player, file in file_of.items() if file == str(files[0])]
    return 0.5 + 0.5 * sum(returns) / len(returns)


def train(updates: int, games: int, seed: int, folder: Path) -> None:
    """Learn, and write the network of every 20th update and the curve to a folder."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network, began = Network(), time.monotonic()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    past = {"model": "player_0", "sample": {"window": 50, "latestRatio": 0.5}}
    policy = {"agents": dict(zip(PLAYERS, (LEARNER, past), strict=True))}
    curve: list[dict[str, float]] = []
    files: list[Path] = []
    with open_fleet(env=ENV, policy=policy, workers=2, frames_per_batch=64 * 64, seed=seed, on_policy=True) as fleet:
        fleet.publish({"player_0": network})
        for number, batch in enumerate(islice(fleet.batches(), updates), start=1):
            learn(batch, network, optimizer)
            fleet.publish({"player_0": network})
            if number % MATCH_EVERY == 0 or number == updates:
                files.append(folder / f"{number}.safetensors")
                save_file(network.state_dict(), files[-1])
                point = {"frames": float(fleet.stats().frames)}
                point["over random moves"] = share_of_wins(files[-1:], {"random": {}}, games)
                if len(files) > 2:
                    over = share_of_wins([files[-1], files[-3]], {"model": "player_0"}, games // 2)
                    point["over the network of 40 updates ago"] = over
                curve.append(point | {"seconds": time.monotonic() - began})
                shares = "  ".join(f"{name} {share:.2f}" for name, share in point.items() if name != "frames")
                print(f"{point['frames']:>8.0f} frames  {curve[-1]['seconds']:4.0f} s  {shares}", flush=True)
    (folder / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")


def main() -> None:
    """Train, and say how it went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--output", type=Path, help="keep the networks and the curve in this folder")
    chosen = options.parse_args()
    scale = (3, 64) if chosen.quick else (UPDATES, GAMES)
    with tempfile.TemporaryDirectory() as unnamed:
        folder = (chosen.output or Path(unnamed)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        train(*scale, chosen.seed, folder)


if __name__ == "__main__":
    main()
