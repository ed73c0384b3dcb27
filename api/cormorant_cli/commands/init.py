"""`cormorant init`: a manifest with comments and a policy beside it, to start from."""

from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.errors import BadInput
from cormorant_cli.printing import tell

_MANIFEST = """\
# Collect with:    cormorant run job.yaml
# Check it with:   cormorant validate job.yaml
# Serve a learner: cormorant run job.yaml --serve --directory head   (with output.queue, below)
apiVersion: cormorant.dev/v1alpha1
kind: CollectorJob
metadata: {name: cartpole}
spec:
  env:
    envpool:
      taskId: CartPole-v1       # envpool.list_all_envs() lists the ids
      numEnvs: 8                # environments of each worker
    # A gymnasium environment instead, each in a process of its own:
    # gymnasium: {id: CartPole-v1, vectorization: subprocess, numEnvs: 8}
  policy:
    entrypoint: policy:make     # policy.py beside this file; or random: {}
  collection:
    framesPerBatch: 256         # of each worker; a multiple of numEnvs
    totalFrames: 20000          # of the whole job, exact; left out: until you stop it
    seed: 1
  output:
    dataset: {uri: data/cartpole}   # durable; `cormorant dataset export` writes Minari or Parquet
    # For a learner instead of, or beside, the dataset:
    # queue: {capacityBatches: 4, onFull: wait}
    # PPO and other on-policy learners also need, under collection, rounds of all workers from the newest weights:
    # mode: sync
    # weights: {maxStaleness: 0}
  replicas: 2                   # workers
"""
_POLICY = '''\
"""The policy of job.yaml: called once in each worker, with the spaces of one environment."""

import torch
from tensordict.nn import TensorDictModule


def make(observation_space, action_space):
    """Reads "observation" [B, 4], writes "action" [B]; replace it with your own network."""
    network = torch.nn.Sequential(
        torch.nn.Linear(observation_space.shape[0], 64), torch.nn.Tanh(), torch.nn.Linear(64, int(action_space.n))
    )

    def act(observation):
        return torch.distributions.Categorical(logits=network(observation)).sample()

    module = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    module.network = network  # its weights are what `cormorant weights push` replaces
    return module
'''


def init(
    directory: Annotated[Path, typer.Argument(help="Folder to write to; created if it does not exist.")] = Path(),
) -> None:
    """Write a commented manifest, job.yaml, and a policy, policy.py.

    Refuses to overwrite existing files.
    """
    if directory.suffix in (".yaml", ".yml", ".json"):
        raise BadInput(
            f"{directory} is a file's name, and init writes two files; name a folder: cormorant init DIRECTORY"
        )
    files = {directory / "job.yaml": _MANIFEST, directory / "policy.py": _POLICY}
    if existing := [str(path) for path in files if path.exists()]:
        raise BadInput(f"{' and '.join(existing)}: already there; name another folder: cormorant init DIRECTORY")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise BadInput(f"cannot write to {directory}: {error}") from error
    manifest, policy = files
    tell({"files": list(files)}, f"wrote {manifest} and {policy}", f"next: cormorant run {manifest}")
