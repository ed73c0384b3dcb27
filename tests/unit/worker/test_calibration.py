"""How many EnvPool threads a worker takes."""

import os

import pytest

from cormorant_worker.envs.calibration import calibrate
from cormorant_worker.envs.envpool import EnvPoolTask


def task(name: str) -> EnvPoolTask:
    return EnvPoolTask(task_id=name, kwargs={})


@pytest.mark.parametrize("one_cpu", [False, True])
def test_many_cheap_envs_get_all_threads_only_if_timed(one_cpu: bool) -> None:
    # A vector step of one CartPole takes 20 us or more, and 1 us of it is the environment's.
    found = calibrate(task("CartPole-v1"), num_envs=512, max_threads=2, one_cpu=one_cpu)
    assert found.num_threads == 1 or {*found.step_seconds} == {1, 2}


def test_images_get_all_threads_without_a_trial() -> None:
    found = calibrate(task("Pong-v5"), num_envs=64, max_threads=2)
    assert (found.num_threads, found.step_seconds) == (2, {})


def test_one_env_or_one_cpu_needs_one_thread() -> None:
    for num_envs, max_threads in ((1, 8), (64, 1)):
        assert calibrate(task("Pong-v5"), num_envs=num_envs, max_threads=max_threads).num_threads == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_calibration_leaves_this_thread_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    calibrate(task("CartPole-v1"), num_envs=512, max_threads=2, one_cpu=True)
    assert os.sched_getaffinity(0) == before
