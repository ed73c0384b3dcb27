"""Appends known blocks to a dataset until it is killed: python writer_process.py FOLDER ATTEMPT [SHARD_BYTES].

Frame n of the part (column n % B) has the observation [n, n] and the reward n. Prints the durable frames after each
batch, so that the parent knows what was promised.
"""

import sys

import numpy as np

from cormorant_testing.datasets import described
from cormorant_worker.collect.block import Block
from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import open_dataset

T, B = 16, 4


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, attempt = sys.argv[1], int(sys.argv[2])
    shard_bytes = int(sys.argv[3]) if len(sys.argv) > 3 else 5000
    layout, description = described(num_rows=T, num_envs=B)
    writer = open_dataset(folder, description).writer(f"cpu-0-{attempt}", layout, shard_bytes=shard_bytes)
    block = Block(layout)
    block.traj_ids[:] = attempt * B + np.arange(B)
    try:
        for batch in range(1_000_000):
            block.begin(T)
            block.lengths[:] = T
            number = batch * T * B + np.arange((T + 1) * B).reshape(T + 1, B)
            block.observation[0][...] = number[..., None]
            block.reward[...] = number[:T]
            writer.append(block)
            tell(writer.durable_frames, (batch + 1) * T * B)
    except DatasetError as error:
        tell("error", error)
        sys.exit(3)


if __name__ == "__main__":
    main()
