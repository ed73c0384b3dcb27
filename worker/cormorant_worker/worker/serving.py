"""An inference server's runtime: one policy, the rows of many workers, and the replies to its fleet.

One thread calls the policy; another one answers the fleet's requests, as in `runtime.py`.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from cormorant_contract.workers import Inference
from cormorant_worker.collect.build import build_policy, make_normalizer
from cormorant_worker.collect.overrides import read_overrides
from cormorant_worker.collect.place import TorchStream, find_device, seed_globals
from cormorant_worker.collect.timing import BUILD, IDLE, INFERENCE, Timing
from cormorant_worker.errors import PolicyLoadError
from cormorant_worker.inference.address import Served
from cormorant_worker.inference.connections import ListeningSocket
from cormorant_worker.inference.server import Gathering, InferenceServer, ServedPolicy, make_shapes
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.spaces import Space
from cormorant_worker.weights.cached import CachedWeights, Offer
from cormorant_worker.worker import messages
from cormorant_worker.worker.heartbeat import Heartbeat, Phase
from cormorant_worker.worker.runtime import Runtime, Uplink

log = structlog.get_logger()

_TELL_S = 1.0
"""Between two reports of what was served."""
_DRY_ROWS = 2
"""In the dry run of a policy for which no worker has come yet."""
_MOST_ROWS = 1024
"""Largest batch shape on a device where no limit is set."""


class ServerRuntime(Runtime):
    """The thread that calls `run` calls the policy."""

    def __init__(
        self, uplink: Uplink, heartbeat: Heartbeat, listener: ListeningSocket, kept: CachedWeights | None = None
    ) -> None:
        super().__init__(uplink, heartbeat, kept)
        self._listener = listener
        self._is_ready = threading.Event()

    def run(self, start: messages.Start) -> None:
        """Serve workers until told to finish. Raises CormorantError where the policy cannot be built or called."""
        self._heartbeat.enter(Phase.BUILDING)
        timing = self._timing = Timing(self._heartbeat.timing)
        seed_globals(start.place)
        self._start = start
        device = self._device = find_device(start.place.device)
        spec = start.job.spec
        self._exploration = ExplorationType(spec.policy.exploration_type)
        # As the manifest says, or as it suits the device.
        inference = spec.inference or Inference()
        shapes = tuple(sorted(inference.batch_shapes))
        if not shapes and device.type == "cuda":
            shapes = make_shapes(inference.max_batch or _MOST_ROWS)
        max_wait_s = -1.0 if inference.max_wait_ms is None else inference.max_wait_ms / 1000
        gathering = Gathering(max_rows=inference.max_batch, max_wait_s=max_wait_s, shapes=shapes)
        server = InferenceServer(self._listener, self._build, gathering)
        server.watch(self._uplink)
        self._uplink.send(messages.Listening(address=self._listener.address))
        stream = TorchStream(start.place.seed_of("server"), device)
        told_s = 0.0
        with stream:
            while True:
                self._heartbeat.frames[0] += 1  # each turn is a sign of life
                if server.turn(self._acting):
                    message = self._uplink.recv()
                    if isinstance(message, messages.BuildPolicy) and self._weights is None:
                        server.policy = self._build(message.observation_space, message.action_space, _DRY_ROWS)
                    if isinstance(message, messages.Finish):
                        break
                elif self._weights is not None and self._boundary.acquire(blocking=False):
                    try:
                        self._weights.apply()
                    finally:
                        self._boundary.release()
                timing.rest(IDLE if self._is_ready.is_set() else BUILD)
                now_s = timing.now_s
                if now_s > told_s + _TELL_S:
                    self._tell(server)
                    told_s = now_s
        self._tell(server)
        server.close()
        self._uplink.send(messages.Finished())

    @contextmanager
    def _acting(self) -> Iterator[None]:
        self._heartbeat.enter(Phase.STEPPING)
        self._timing.rest(INFERENCE)
        with self._boundary, torch.no_grad(), exploring(self._exploration):
            yield
        self._heartbeat.enter(Phase.WAITING)

    def _build(self, observation: Space, action: Space, num_rows: int) -> ServedPolicy:
        self._heartbeat.enter(Phase.BUILDING)
        overrides = read_overrides(self._start.overrides)
        normalizer = make_normalizer(self._start.job, observation)
        policy = build_policy(
            self._start.job, overrides, observation, action, normalizer, device=self._device, num_rows=num_rows,
            is_server=True,
        )  # fmt: skip
        if policy is None:
            raise PolicyLoadError(
                "the policy is random: there is nothing to serve; remove the groups of role inference"
            )
        policy.weights.on_applied = lambda version: self._uplink.send(messages.Applied(version=version))
        self._weights = policy.weights
        self._is_ready.set()
        self._heartbeat.enter(Phase.WAITING)
        self._uplink.send(messages.ServerReady(kept_version=self._kept.version))
        return policy

    def _tell(self, server: InferenceServer) -> None:
        if server.served.acts:
            self._uplink.send(server.served)
            server.served = Served()

    # -- other threads -------------------------------------------------------------------------------------------

    def _answer(self, command: messages.Command, payload: memoryview) -> bytes:
        match command:
            case messages.PlainCommand.STOP:
                os._exit(0)  # it has nothing to lose
            case Offer():
                self._is_ready.wait()  # bounded by the fleet's limit on starting
        return super()._answer(command, payload)
