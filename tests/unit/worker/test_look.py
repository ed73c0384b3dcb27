"""What an environment shows to an onlooker, between batches and in the middle of one."""

import threading

import numpy as np
import pytest

from cormorant_testing.collecting import make_collector
from cormorant_worker.collect.block import Block


@pytest.mark.parametrize("env_groups", [1, 2])
@pytest.mark.parametrize("observation", ["box", "image", "nested"])
def test_between_batches_it_is_what_the_next_one_begins_with(env_groups: int, observation: str) -> None:
    collector = make_collector(num_envs=3, env_groups=env_groups, lengths=(3, 5), observation=observation)
    block = Block(collector.layout(8))
    leaves = range(len(block.observation))
    for size in (1, 7, 24, 3, 20):
        shown = [[collector.look(column, leaf) for leaf in leaves] for column in range(3)]
        collector.fill(block, size)
        for column, arrays in enumerate(shown):
            if block.lengths[column]:
                for array, stored in zip(arrays, block.observation, strict=True):
                    assert np.array_equal(array, stored[0, column])


def test_in_the_middle_of_a_batch_it_moves_with_the_environment() -> None:
    collector = make_collector(num_envs=2, lengths=(1000,), step_s=0.0005)
    block = Block(collector.layout(60))
    steps: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            steps.append(float(collector.look(1, 0)[2]))  # ident, episode, step, echo
            is_over.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    collector.fill(block, 120)
    is_over.set()
    watcher.join(10)
    assert steps == sorted(steps), "never an older row"
    assert len(set(steps)) > 10, "not only the ends of batches"
    assert set(steps) <= set(map(float, range(61)))


def test_an_environment_that_is_not_there_is_an_error() -> None:
    collector = make_collector(num_envs=3, env_groups=2)
    with pytest.raises(IndexError, match="environment 3 of 3"):
        collector.look(3, 0)
    with pytest.raises(IndexError):
        collector.look(0, 1)
