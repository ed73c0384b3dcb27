"""How many EnvPool threads a worker takes."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cormorant_worker.envs import pools
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.pools import calibrate


def task(name: str) -> EnvPoolTask:
    return EnvPoolTask(task_id=name, kwargs={})


class Disturbed(EnvPoolTask):
    """An environment takes 100 us of a thread; something else runs while two threads are first probed."""

    num_opened, now_s = 0, 0.0

    def open(self, *, num_threads: int, seeds: Sequence[int], **given: Any) -> Any:
        env = super().open(num_threads=num_threads, seeds=seeds, **given)
        seconds, recv = 100e-6 * len(seeds) / num_threads, env.recv
        if num_threads == 2:
            Disturbed.num_opened += 1
            seconds *= 4 if Disturbed.num_opened == 1 else 1

        def recv_later() -> Any:
            Disturbed.now_s += seconds
            return recv()

        env.recv = recv_later  # type: ignore[method-assign]
        return env


def test_a_disturbed_probe_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "time", SimpleNamespace(perf_counter=lambda: Disturbed.now_s))
    num_threads, _ = calibrate(Disturbed(task_id="CartPole-v1", kwargs={}), num_envs=24, max_threads=2)
    assert (num_threads, Disturbed.num_opened) == (2, 2)


@pytest.mark.parametrize("one_cpu", [False, True])
def test_many_cheap_envs_get_all_threads_only_if_timed(one_cpu: bool) -> None:
    # A vector step of one CartPole takes 20 us or more, and 1 us of it is the environment's.
    num_threads, step_seconds = calibrate(task("CartPole-v1"), num_envs=512, max_threads=2, one_cpu=one_cpu)
    assert num_threads == 1 or {*step_seconds} == {1, 2}


@pytest.mark.parametrize(("num_envs", "max_threads", "num_threads"), [(64, 2, 2), (1, 8, 1), (64, 1, 1)])
def test_images_get_all_threads_without_a_trial(num_envs: int, max_threads: int, num_threads: int) -> None:
    found = calibrate(task("Pong-v5"), num_envs=num_envs, max_threads=max_threads)
    assert found == (num_threads, {})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_calibration_leaves_this_thread_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    calibrate(task("CartPole-v1"), num_envs=512, max_threads=2, one_cpu=True)
    assert os.sched_getaffinity(0) == before
