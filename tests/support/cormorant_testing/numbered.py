"""Jobs whose frames can be told apart, and a learner in a pod that audits them: it knows each frame by its number."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cormorant_testing.kubectl import Namespace
from cormorant_testing.real_job import SMALL, WAIT_S, Job, learning, running, small_job

FRAMES = 100
CODE = """
import os
import time

import gymnasium
import numpy as np

class Numbered(gymnasium.Env):
    '''Frames that can be told apart: who made them is in the observation, and which one it is in the reward.'''
    observation_space = gymnasium.spaces.Box(0, 2**24, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.name = np.array([int.from_bytes(os.urandom(3), "big") for _ in range(2)], np.float32)
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.name, {}

    def step(self, action):
        time.sleep(0.004)
        self.count += 1
        return self.name, float(self.count), False, self.count % 50 == 0, {}
"""
LEARNER = """
import json
import time

import numpy as np

from cormorant_client import connect

seen, frames, duplicates = {}, 0, 0
with connect() as client:
    for batch in client.deliveries(prefetch=0):
        data = batch.numpy()
        numbers, names = data["next"]["reward"][..., 0], data["observation"]
        is_frame = data["collector"].get("mask", np.ones(numbers.shape, bool))
        for name, number in zip(names[is_frame].tolist(), numbers[is_frame].tolist(), strict=True):
            known = seen.setdefault(tuple(name), set())
            duplicates += number in known
            known.add(number)
            frames += 1
        missing = sum(int(max(known)) - len(known) for known in seen.values())
        told = {"at": time.time(), "head": batch.id.partition("-")[0], "frames": frames}
        told |= {"duplicates": duplicates, "missing": missing}
        print(json.dumps(told), flush=True)
"""


def manifest(name: str, template: dict[str, Any], *, on_full: str, workers: int = 1) -> dict[str, Any]:
    """A job whose workers collect 250 frames a second each."""
    return small_job(
        name,
        {"gymnasium": {"entrypoint": "numbered:Numbered", "vectorization": "inline", "numEnvs": 2}},
        workers=workers,
        code={"configMap": "numbered"},
        collection={"framesPerBatch": FRAMES},
        output={"queue": {"capacityBatches": 4, "onFull": on_full}},
        head={"resources": SMALL, "template": template},
        workerGroups=[{"name": "cpu", "resources": SMALL, "template": template}],
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What the learner said of one batch, and of all before it."""

    at: float
    head: str
    """Which head lent it."""
    frames: int
    duplicates: int
    missing: int


@dataclass(frozen=True, slots=True)
class Learner:
    """A pod that takes every batch of a job by the client library."""

    job: Job
    pod: str

    def seen(self) -> list[Seen]:
        return [Seen(**line) for line in self.job.said_by(self.pod)]

    def frames(self) -> int:
        return max((seen.frames for seen in self.seen()), default=0)

    def wait_for(self, batches: int, *, within_s: float = WAIT_S) -> None:
        """Until it has so many more."""
        least = self.frames() + batches * FRAMES
        self.job.until(lambda: self.frames() >= least, what=f"the learner has {least} frames", within_s=within_s)

    def gap_s(self, since: float) -> float:
        """The longest time without a batch since a moment."""
        times = [seen.at for seen in self.seen()]
        return max((then - now for now, then in itertools.pairwise(times) if then >= since), default=0.0)

    def wait_for_next_head(self, after: Seen, *, within_s: float) -> Seen:
        """The first batch that another head lent."""
        found: list[Seen] = []
        self.job.until(
            lambda: found.extend(s for s in self.seen() if s.at > after.at and s.head != after.head) or found,
            what="a batch of the next head",
            within_s=within_s,
        )
        return found[0]


@contextmanager
def audited(namespace: Namespace, document: dict[str, Any], *, image: str) -> Iterator[Learner]:
    """A job of numbered frames that collects, and its learner in a pod."""
    namespace.apply_files("numbered", {"numbered.py": CODE, "learner.py": LEARNER})
    with running(namespace, document) as job:
        job.until_ready()
        with learning(job, "python", "-u", "/code/learner.py", image=image, code="numbered") as pod:
            learner = Learner(job, pod)
            learner.wait_for(3)
            yield learner
