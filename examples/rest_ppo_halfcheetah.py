"""PPO on HalfCheetah with normalized observations and rewards, by a learner that may be killed at any time.

    cormorant run examples/halfcheetah-ppo.yaml --serve --directory head   # makes head/tokens.json
    python examples/rest_ppo_halfcheetah.py --url http://127.0.0.1:8000 --token-file head/tokens.json

Kill it (`kill -9`) and start it again: it goes on with the weights, the optimizer and the counters of one version.
"""

import argparse
import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from ppo import Agent, Ppo, Settings, make_critic

from cormorant import Client, Delivery, connect
from cormorant.policies import mlp
from cormorant.postproc import normalized

SETTINGS = Settings(gamma=0.99, lambda_=0.95, epochs=10, minibatch=64, learning_rate=3e-4, entropy_bonus=0.0)
KEY = "learner"


@dataclass(kw_only=True)
class State:
    """Metadata of each version of the weights."""

    updates: int = 0
    frames: int = 0
    batch: str = ""  # id of the batch that the newest update learned from
    learning_rate: float = SETTINGS.learning_rate
    best_return: float | None = None
    checkpoint: str = ""  # file with optimizer and critic, which are too large for metadata
    sha256: str = ""


class Learner:
    """A policy, its optimizer, and the state that belongs to both."""

    def __init__(self, client: Client, folder: Path, *, seed: int) -> None:
        self.client, self.folder, self.seed = client, folder, seed
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # networks this small are slower on several threads
        # The manifest's policy, built a second time: the head checks that names, shapes and dtypes are the same.
        self.policy = mlp(
            gymnasium.spaces.Box(-np.inf, np.inf, (17,)), gymnasium.spaces.Box(-1, 1, (6,)), return_log_prob=True
        )
        self.ppo = Ppo(Agent(self.policy, make_critic(17)), SETTINGS)
        self.state, self.version = State(), client.models().version
        if self.version:
            self._resume()
        else:
            self._publish()

    def learn(self, batch: Delivery, *, total_frames: int) -> float | None:
        """One update, published before the head may forget the batch. Returns the mean return of the last episodes."""
        state = self.state
        torch.manual_seed(self.seed + state.updates)  # the same minibatches, whether it was killed before or not
        state.learning_rate = SETTINGS.learning_rate * (1 - state.frames / total_frames)
        self.ppo.optimizer.param_groups[0]["lr"] = state.learning_rate
        # Frames are raw; the policy saw them with the statistics of its version, which the batch brings.
        self.ppo.update(normalized(batch.tensordict(), batch.statistics))
        state.updates, state.frames, state.batch = state.updates + 1, state.frames + batch.num_frames, batch.id
        mean_return = self.client.status().episodes.mean_return
        if mean_return is not None:
            state.best_return = max(mean_return, state.best_return or mean_return)
        self._publish()
        return mean_return

    def _publish(self) -> None:
        """File first, then weights and state at once: killed in between, the newest weights still have a file."""
        buffer = io.BytesIO()
        torch.save({"optimizer": self.ppo.optimizer.state_dict(), "critic": self.ppo.agent.critic.state_dict()}, buffer)
        path = self.folder / f"update-{self.state.updates}.pt"
        partial = path.with_suffix(".partial")
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
        self.state.checkpoint, self.state.sha256 = str(path), hashlib.sha256(buffer.getvalue()).hexdigest()
        metadata = {KEY: json.dumps(asdict(self.state))}
        self.version = self.client.publish(self.policy, wait=30, metadata=metadata).version
        for old in self.folder.glob("update-*.pt"):
            if int(old.stem.partition("-")[2]) < self.state.updates - 1:
                old.unlink()

    def _resume(self) -> None:
        newest = self.client.weights(version=self.version)
        if KEY not in newest.metadata:
            raise SystemExit(f"version {self.version} was published without this learner's state; start a new job")
        self.state = State(**json.loads(newest.metadata[KEY]))
        content = Path(self.state.checkpoint).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.state.sha256:
            raise SystemExit(f"{self.state.checkpoint} is not the file of version {self.version}: its SHA-256 differs")
        checkpoint = torch.load(io.BytesIO(content), weights_only=True)
        self.policy.load_state_dict(newest.state_dict())
        self.ppo.agent.critic.load_state_dict(checkpoint["critic"])
        self.ppo.optimizer.load_state_dict(checkpoint["optimizer"])


def train(learner: Learner, *, curve: Path | None) -> None:
    """Learn until the stream ends."""
    client, state = learner.client, learner.state
    total_frames = client.status().frames.target or 1_000_000
    note(curve, {"event": "start", "version": learner.version, "updates": state.updates, "frames": state.frames})
    with client.deliveries() as batches:
        for batch in batches:
            if batch.id == state.batch:
                continue  # killed between publishing and acknowledging: learned from it already
            mean_return = learner.learn(batch, total_frames=total_frames)
            line = {"event": "update", "version": learner.version, "updates": state.updates, "frames": state.frames}
            note(curve, {**line, "learning_rate": state.learning_rate, "return": mean_return})
    best = "none ended" if state.best_return is None else f"{state.best_return:.1f}"
    print(f"{state.updates} updates, {state.frames} frames, best mean return of 100 episodes: {best}")


def note(curve: Path | None, line: dict[str, Any]) -> None:
    """Print a line, and append it to the curve's file."""
    text = json.dumps(line)
    print(text, flush=True)
    if curve is not None:
        with curve.open("a") as file:
            file.write(text + "\n")


def main() -> None:
    """Train, or go on training."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", help="the head; default: CORMORANT_URL")
    options.add_argument("--token-file", help="default: CORMORANT_TOKEN, CORMORANT_TOKEN_FILE")
    options.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder of optimizer and critic")
    options.add_argument("--curve", type=Path, help="append starts and returns as JSON Lines")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    folder = chosen.checkpoints.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with connect(chosen.url, token_file=chosen.token_file) as client:
        train(Learner(client, folder, seed=chosen.seed), curve=chosen.curve)


if __name__ == "__main__":
    main()
