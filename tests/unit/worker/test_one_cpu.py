"""Threads that take turns keep to one CPU, for as long as they have it alone."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_native_id

import pytest
import torch
from torch import nn

from cormorant.policies import mlp
from cormorant_contract.job import CollectorJob
from cormorant_testing.scripts import until
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.cpus import OneCpu, native_threads
from cormorant_worker.spaces import Space
from manifest_making import collector_job

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs on Linux"
)


@contextmanager
def pool_thread() -> Iterator[int]:
    """Native id of a thread that waits."""
    ends, ids = Event(), list[int]()
    thread = Thread(target=lambda: (ids.append(get_native_id()), ends.wait()))
    thread.start()
    while not ids:
        time.sleep(0.001)
    yield ids[0]
    ends.set()
    thread.join()


def test_they_leave_a_cpu_that_others_want_and_try_again_later() -> None:
    before, now_s = os.sched_getaffinity(0), [0.0]

    def keeps() -> bool:
        with cpu:
            assert (
                os.sched_getaffinity(0) == os.sched_getaffinity(pool) == ({cpu.cpu} if cpu.cpu is not None else before)
            )
            kept = cpu.cpu is not None
        assert os.sched_getaffinity(0) == before
        return kept

    with pool_thread() as pool:
        cpu = OneCpu(frozenset({pool}), lambda: now_s[0])
        for _ in range(2):
            assert keeps()
            cpu.judge(wall_s=0.2, cpu_s=0.16)
            assert keeps()
            cpu.judge(wall_s=0.2, cpu_s=0.14)
            now_s[0] += 9.5
            assert not keeps()
            now_s[0] += 0.5


def test_threads_are_free_again_after_it_gave_up() -> None:
    before = os.sched_getaffinity(0)
    with pool_thread() as stays:
        with pool_thread() as ends:
            cpu = OneCpu(frozenset({stays, ends}))
            with cpu:
                assert os.sched_getaffinity(stays) == {cpu.cpu}
        until(lambda: ends not in native_threads())
        with cpu:
            time.sleep(0.25)  # after a window it counts their time, and one is gone
        assert cpu.cpu is None
        assert os.sched_getaffinity(stays) == before


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("num_threads", "of_script", "of_policy", "keeps"),
    [(1, 1, 1, True), (2, 1, 1, False), (1, 2, 2, False), (1, 1, 2, False)],
)
def test_a_pool_of_one_thread_keeps_to_the_cpu_of_its_policy(
    num_threads: int, of_script: int, of_policy: int, *, keeps: bool
) -> None:
    """Unless the script or its policy has given torch threads."""

    def make_policy(observation: Space, action: Space) -> nn.Module:
        torch.set_num_threads(of_policy)
        return mlp(observation, action)

    torch.set_num_threads(of_script)
    known = native_threads()
    env = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8, "numThreads": num_threads}}
    spec = {"env": env, "policy": {"entrypoint": "cormorant.policies:mlp"}, "collection": {"framesPerBatch": 64}}
    job = CollectorJob.model_validate(collector_job("one-cpu", spec))
    overrides = WorkerOverrides(policy_factory=make_policy, takes_spaces=True)
    with build_collector(job, WorkerPlace(seed=1), overrides) as collector:
        collector.fill(Block(collector.layout(8)), 64)
        pool = [os.sched_getaffinity(thread) for thread in native_threads() - known]
    assert (collector.cpu.cpu is not None) == keeps
    assert ({collector.cpu.cpu} in pool) == keeps
