"""Kinds of environments whose libraries come with an image of the user's, each as a job on the node."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cormorant_client.delivery import decode
from cormorant_testing.placements.parties import PartyJob, PartyLoop
from cormorant_testing.real_cluster import PREFIX, ROOT, Installation, build_image
from cormorant_testing.real_job import note, running, small_job

pytestmark = pytest.mark.slow

SUPPORT = ROOT / "tests" / "support" / "cormorant_testing"
DOCKERFILE = """
FROM python:3.11-slim-bookworm AS libraries
RUN python -m venv /opt/pip \
 && /opt/pip/bin/pip install --quiet --no-deps --target /libraries jax jaxlib ml_dtypes opt_einsum scipy pettingzoo
FROM {image}
COPY --from=libraries /libraries /opt/libraries
COPY agents.py functional.py /opt/libraries/
ENV PYTHONPATH=/opt/cormorant:/opt/libraries
"""
BATCHES = 12


@pytest.fixture(scope="module")
def image(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> str:
    name, folder = f"{PREFIX}/kinds:{installed.images.tag}", tmp_path_factory.mktemp("kinds")
    for module in ("agents.py", "functional.py"):
        (folder / module).write_text((SUPPORT / module).read_text())
    (folder / "Dockerfile").write_text(DOCKERFILE.format(image=installed.images.job))
    build_image(name, folder)
    return name


class ChainCheck:
    """What follows a frame is what the next one begins with, unless an episode ended there."""

    def __init__(self) -> None:
        self.frames, self.ended = 0, list[int]()
        self._following: torch.Tensor | None = None
        self._goes_on = torch.zeros(0)

    def take(self, batch: Any) -> None:
        for t in range(batch.shape[1]):
            observation, after = batch["observation"][:, t], batch["next", "observation"][:, t]
            if self._following is not None:
                is_same = (observation == self._following).all(-1)
                assert (is_same == self._goes_on).all(), (self.frames, t)
            self._following, self._goes_on = after, ~batch["next", "done"][:, t, 0]
            self.frames += len(batch)
            self.ended += [self.frames] * int((~self._goes_on).sum())


@pytest.mark.parametrize(
    ("kind", "block", "check"),
    [
        ("vector", {"id": "CartPole-v1"}, ChainCheck),
        ("pettingzoo", {"entrypoint": "agents:Party"}, partial(PartyLoop, PartyJob(absences="deaths", num_envs=4))),
        ("jax", {"entrypoint": "functional:make"}, ChainCheck),
    ],
)
def test_every_frame_is_the_environments(
    installed: Installation, image: str, kind: str, block: dict[str, Any], check: Callable[[], ChainCheck | PartyLoop]
) -> None:
    collection = {"framesPerBatch": 128, "totalFrames": 128 * BATCHES}
    manifest = small_job(kind, {kind: {**block, "numEnvs": 4}}, image=image, collection=collection)
    checked = check()
    with running(installed.jobs, manifest) as job:
        for _ in range(BATCHES):
            batch = job.take()
            checked.take(decode(memoryview(batch.body)).tensordict(copy=True))
            job.ack(batch)
        assert job.take().status == 410
        note(f"{kind}: {checked.frames} frames, {len(checked.ended)} ends of episodes")
    assert checked.frames == 128 * BATCHES
    assert checked.ended
