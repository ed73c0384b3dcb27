"""Connect Four by self-play: one network plays both sides and learns from both, in a few minutes.

    python examples/self_play.py

Two worker processes play EnvPool's ConnectFour-v1 against themselves; this process learns by PPO from each player's
own view of the board. Every 25 updates it plays 400 games against random moves, and 400 against the network of 50
updates ago.
"""

import argparse
import copy
import time
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from cormorant import open_fleet

ENV = {"envpool": {"taskId": "ConnectFour-v1", "numEnvs": 64}}
UPDATES, MATCH_EVERY, GAMES = 150, 25, 400
GAMMA, LAMBDA = 0.95, 0.9


class Network(nn.Module):
    """Which column to play, and how the game will end: -1 to 1, for the player whose view a position is."""

    def __init__(self) -> None:
        super().__init__()
        four_by_four = nn.Sequential(nn.Conv2d(2, 64, 4), nn.ReLU(), nn.Flatten())
        self.trunk = nn.Sequential(four_by_four, nn.Linear(64 * 12, 128), nn.ReLU())
        self.column, self.value = nn.Linear(128, 7), nn.Linear(128, 1)

    def forward(self, agents: Any) -> tuple[torch.distributions.Categorical, Tensor]:
        """`agents`: observation [..., 6, 7, 2] and action_mask [..., 7]. Returns the moves, and values [...]."""
        observation = agents["observation"]
        boards = observation.reshape(-1, 6, 7, 2).permute(0, 3, 1, 2).float()
        features = self.trunk(boards).unflatten(0, observation.shape[:-3])
        logits = self.column(features).masked_fill(~agents["action_mask"], -1e8)
        return torch.distributions.Categorical(logits=logits), self.value(features).squeeze(-1)


class Match(nn.Module):
    """A policy: plays `first` against `second`. Of its two actions, the environment uses the one whose turn it is."""

    def __init__(self, first: Network, second: Network) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, observation: Any) -> dict[str, dict[str, Tensor]]:
        agents = observation["agents"]
        actions, log_probs = [], []
        for player, network in enumerate((self.first, self.second)):
            moves, _ = network({key: agents[key][:, player] for key in ("observation", "action_mask")})
            actions.append(moves.sample())
            log_probs.append(moves.log_prob(actions[-1]))
        return {"agents": {"action": torch.stack(actions, 1), "action_log_prob": torch.stack(log_probs, 1)}}


def advantages(batch: Any, network: Network) -> tuple[Tensor, Tensor]:
    """Generalized advantages and targets of the value, [B, T, 2]: each player has a view and a reward in every turn."""
    with torch.no_grad():
        now, following = network(batch["agents"])[1], network(batch["next", "agents"])[1]
    reward, done, terminated = (batch["next", "agents", key].squeeze(-1) for key in ("reward", "done", "terminated"))
    delta = reward + GAMMA * following * ~terminated - now
    advantage, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + GAMMA * LAMBDA * running * ~done[:, t]
        advantage[:, t] = running
    return advantage, advantage + now


def learn(batch: Any, network: Network, optimizer: torch.optim.Optimizer) -> None:
    """One update of PPO: moves from the turns that a player took, values from its view of every turn."""
    advantage, target = (values.flatten() for values in advantages(batch, network))
    keys = ("observation", "action_mask", "action", "action_log_prob", "mask")
    views = {key: batch["agents", key].flatten(0, 2) for key in keys}
    own = advantage[views["mask"]]
    advantage = (advantage - own.mean()) / (own.std() + 1e-8)
    for part in torch.randperm(len(advantage)).repeat(4).split(2048):
        moves, value = network({key: views[key][part] for key in ("observation", "action_mask")})
        ratio = (moves.log_prob(views["action"][part]) - views["action_log_prob"][part]).exp()
        gain = torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]) + 0.03 * moves.entropy()
        error = (value - target[part]).square().mean()
        optimizer.zero_grad()
        (0.5 * error - gain[views["mask"][part]].mean()).backward()
        optimizer.step()


def share_of_wins(first: Network, second: Network, games: int) -> float:
    """The share of its games that `first` wins; a draw counts one half."""
    won, played = 0.0, 0
    with open_fleet(env=ENV, policy=Match(first, second), frames_per_batch=64 * 45) as fleet:
        while played < games:
            batch = fleet.next_batch()
            ended = batch["next", "done"].squeeze(-1)
            reward = batch["next", "agents", "reward"][ended][:, 0]
            won, played = won + (0.5 + 0.5 * reward).sum().item(), played + len(reward)
    return won / played


def random_moves() -> Network:
    """A network that prefers no column."""
    network = Network()
    nn.init.zeros_(network.column.weight)
    nn.init.zeros_(network.column.bias)
    return network


def train(updates: int, games: int, seed: int) -> float:
    """Learn; returns the share of wins over random moves."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network, began, share = Network(), time.monotonic(), 0.0
    policy = Match(network, network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    past: list[Network] = []
    with open_fleet(env=ENV, policy=policy, workers=2, frames_per_batch=64 * 64, seed=seed, on_policy=True) as fleet:
        for number, batch in enumerate(islice(fleet.batches(), updates), start=1):
            learn(batch, network, optimizer)
            fleet.publish(policy)
            if number % MATCH_EVERY == 0 or number == updates:
                past.append(copy.deepcopy(network))
                share = share_of_wins(network, random_moves(), games)
                seconds = time.monotonic() - began
                line = f"{fleet.stats().frames:>8} frames  {seconds:4.0f} s  over random moves {share:.2f}"
                if len(past) > 2:
                    line += f"  over the network of 50 updates ago {share_of_wins(network, past[-3], games):.2f}"
                print(line, flush=True)
    return share


def main() -> None:
    """Train, and say how it went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    train(3 if chosen.quick else UPDATES, 64 if chosen.quick else GAMES, chosen.seed)


if __name__ == "__main__":
    main()
