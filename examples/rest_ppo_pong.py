"""PPO on Pong over HTTP, while collecting goes on with the weights that were published last.

    cormorant run examples/pong-ppo.yaml --serve                           # prints where the token file is
    python examples/rest_ppo_pong.py --url http://127.0.0.1:8000 --token-file FILE

It shows the plumbing for image observations. On two cores it makes a few hundred frames per second: the return begins
to climb after about a million frames and is near 20 after ten million, so full training takes hours to days. A GPU for
this process shortens that.
"""

import argparse
import time

import torch
from ppo import Ppo, Settings, SharedAgent
from torch import nn

from cormorant import Client, LearnerLink, connect
from cormorant.policies import atari_cnn

SETTINGS = Settings(
    gamma=0.99, lambda_=0.95, clip=0.1, epochs=3, minibatch=256, learning_rate=2.5e-4, entropy_bonus=0.01
)


def train(client: Client, *, max_updates: int, seed: int) -> list[tuple[float, float]]:
    """Learn until the stream ends. Returns the loss of each update, in its first and its last epoch."""
    torch.manual_seed(seed)
    policy = atari_cnn(*client.spaces, return_log_prob=True)
    ppo = Ppo(SharedAgent(policy, nn.Linear(512, 1)), SETTINGS)
    began, losses = time.monotonic(), []
    link = LearnerLink(client, policy)
    for number, batch in enumerate(link.batches(), start=1):
        losses.append(ppo.update(batch))
        link.step()  # publishes; workers use the weights from their next batch on
        stats = client.stats()
        played = stats.mean_return or 0.0
        first, last = losses[-1]
        print(
            f"{stats.frames:>9} frames  {time.monotonic() - began:6.0f} s  version {link.version:>4}  "
            f"staleness {link.staleness.mean:.1f}  loss {first:.4f} -> {last:.4f}  return {played:.1f}"
        )
        if number == max_updates:
            break
    return losses


def main() -> None:
    """Train."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", help="the head; default: CORMORANT_URL")
    options.add_argument("--token-file", help="default: CORMORANT_TOKEN, CORMORANT_TOKEN_FILE")
    options.add_argument("--updates", type=int, default=0, help="end after so many; 0: with the stream")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with connect(chosen.url, token_file=chosen.token_file) as client:
        losses = train(client, max_updates=chosen.updates, seed=chosen.seed)
    first, last = (sum(column) / len(losses) for column in zip(*losses, strict=True))
    print(f"{len(losses)} updates, loss {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()
