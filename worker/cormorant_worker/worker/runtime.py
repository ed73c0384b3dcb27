"""A worker's runtime: one collector, its sink, and the replies to its fleet. Independent of the transport.

One thread steps; other threads answer requests. `worker_main.py` gives it sockets and shared memory, the Ray
actor gives it calls and objects.
"""

import os
import threading
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle
import structlog

from cormorant_worker import errors
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.build import build_collector, rebuild
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.overrides import read_overrides
from cormorant_worker.collect.pause_gate import Stopped
from cormorant_worker.collect.place import seed_globals
from cormorant_worker.collect.timing import BUILD, IDLE, STORE, WEIGHTS, Timing
from cormorant_worker.collect.trajectories import Episodes
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.evaluation.player import Player, alone
from cormorant_worker.inference.address import AssignedServers
from cormorant_worker.inference.remote_actor import RemoteActor
from cormorant_worker.weights.blob import read_weights
from cormorant_worker.weights.cached import CachedWeights, Offer
from cormorant_worker.weights.staged import INITIAL_VERSION, RANDOM_VERSION, PolicyVersion, StagedWeights
from cormorant_worker.worker import messages
from cormorant_worker.worker.heartbeat import Heartbeat, Phase

if TYPE_CHECKING:
    from cormorant_worker.sinks.shards import ShardWriter

log = structlog.get_logger()

_OFFER_TIMEOUT_S = 30.0
"""For weights that were offered before a ticket was handed out: they come on the other channel, within milliseconds."""
_MOMENT_S = 0.01
_IDLE_S = 5.0
"""Without a ticket, after which the open shard is sealed."""
_HELD_TIMEOUT_S = 600.0
"""A pause is answered once the vector step under way has landed; the environments' own limits end it sooner."""


class Uplink(Protocol):
    def send(self, message: object) -> None:
        """Report to the fleet. Called by all threads."""

    def recv(self) -> Any:
        """The fleet's next Begin, Ticket, Reseed or Finish, for as long as the fleet lives. For the stepping thread."""

    def has_message(self, timeout_s: float) -> bool:
        """Wait for the fleet's next message, at most `timeout_s`. Called by the stepping thread."""

    def fileno(self) -> int:
        """File descriptor that is readable when the fleet's next message is there."""

    def block(self, ticket: messages.Ticket, layout: Layout) -> Block:
        """Memory for a ticket's batch. Called by the stepping thread, right after it received the ticket."""


class Runtime:
    """Behind an uplink. The thread that calls `run` acts; `answer` is called by others."""

    def __init__(self, uplink: Uplink, heartbeat: Heartbeat, kept: CachedWeights | None = None) -> None:
        self._uplink = uplink
        self._heartbeat = heartbeat
        self._kept = kept or CachedWeights(None)
        self._weights: StagedWeights | None = None
        """The policy's, once it is built."""
        self._boundary = threading.Lock()
        """Held by the acting thread during a batch or a policy call: who has it sees the policy between two of them."""

    @property
    def acts_as_published(self) -> bool:
        """Whether the policy uses published weights instead of its initial ones."""
        return self._weights is not None and self._weights.version > INITIAL_VERSION

    def run(self, start: messages.Start) -> None:
        """Build, report, and act until told to finish."""
        raise NotImplementedError

    def answer(self, request: messages.Request, payload: memoryview) -> messages.Reply:
        """Answer requests in their order. A payload is a view, kept until applied: its memory must not change."""
        try:
            return messages.Reply(number=request.number, state=self._answer(request.command, payload))
        except errors.CormorantError as error:
            return messages.Reply(number=request.number, error=str(error))
        except Exception as error:  # noqa: BLE001  # a user's get_state, set_state or copy_ may raise anything
            return messages.Reply(number=request.number, error=f"{type(error).__name__}: {error}")

    def _answer(self, command: messages.Command, payload: memoryview) -> bytes:
        if command is messages.PlainCommand.READ_CACHED:
            return self._kept.read()
        if isinstance(command, Offer):
            weights = self._weights
            assert weights is not None
            try:
                offered = read_weights(payload, default_model=command.default_model, models=command.models)
                weights.offer(offered, version=command.version, statistics=command.statistics)
            finally:
                weights.note_seen(command.version)  # refused or not: a ticket that came with it goes on
            # New weights act at once in a worker that waits for a ticket, or for rows. Otherwise the thread that acts
            # will see them when it is done; outside it holds the lock for a moment only.
            if self._boundary.acquire(timeout=_MOMENT_S):
                try:
                    weights.apply()
                finally:
                    self._boundary.release()
            self._kept.keep(replace(command, models=tuple(offered)), payload)
        return b""


class WorkerRuntime(Runtime):
    """One collector and its sink."""

    def __init__(self, uplink: Uplink, heartbeat: Heartbeat, kept: CachedWeights | None = None) -> None:
        super().__init__(uplink, heartbeat, kept)
        self._sink: ShardWriter | None = None
        self._servers = AssignedServers()
        self._serving = threading.Event()
        """Everything is open: tickets and requests can be answered."""

    @property
    def acts_as_published(self) -> bool:
        # Where a script hears of errors, an action that must not be sent ends the fleet: workers that are replaced get
        # the same weights, and fail in the same way.
        return super().acts_as_published and not self._overrides.raises

    # -- the stepping thread -----------------------------------------------------------------------------------

    def run(self, start: messages.Start) -> None:
        """Build, report, and fill blocks until told to finish. Raises Stopped where the fleet abandoned the batch; all
        is closed.
        """
        self._heartbeat.enter(Phase.BUILDING)
        timing = self._timing = Timing(self._heartbeat.timing)
        seed_globals(start.place)
        self._overrides = read_overrides(start.overrides)
        job = start.job if start.job.spec.collection.episodes is None else alone(start.job)
        self._servers.begin(start.place.servers)
        self.collector: Collector = build_collector(job, start.place, self._overrides, servers=self._servers)
        self._weights = self.collector.weights
        if isinstance(self.collector.actor, RemoteActor):
            self.collector.actor.on_waiting = self._noting(Phase.ASKING)
        self.collector.pulse = self._heartbeat.frames
        self.collector.timing = timing
        # Reported wherever weights begin to act: here between batches, or in the collector as it begins one.
        self.collector.weights.on_applied = lambda version: self._uplink.send(messages.Applied(version=version))
        self._layout = self.collector.layout(-(-start.frames_per_batch // self.collector.num_envs))
        # Environments that are built again must not be calibrated again: the seed alone decides what they do.
        self._job, self._place = start.job, replace(start.place, num_threads=self.collector.num_threads)
        if start.job.spec.collection.episodes is not None:
            self._player = Player(
                start.job,
                self.collector,
                overrides=self._overrides,
                max_threads=start.place.max_threads or available_cpus(),
            )
            self._player.on_building = self._noting(Phase.BUILDING)
            self.collector.close()  # episodes are played in environments of their own
        observation, action = self.collector.spaces
        self._uplink.send(
            messages.Ready(
                layout=self._layout,
                observation_space=observation,
                action_space=action,
                specs=self.collector.weights.specs,
                num_threads=self.collector.num_threads,
                kept_version=self._kept.version,
                kept_settled=self._kept.settled,
                statistics=None if self.collector.moments is None else self.collector.moments.initial,
            )
        )
        begin = self._uplink.recv()
        if isinstance(begin, messages.Finish):
            self._finish(saves=begin.saves)
            return
        assert isinstance(begin, messages.Begin), begin
        if begin.dataset_uri:
            self._sink = _open_sink(begin, start, self.collector, self._layout)
        self._serving.set()
        try:
            self._serve()
        except Exception:
            if self._sink is not None:
                # This process is about to fail: the batches that landed outlive it.
                self._heartbeat.enter(Phase.STORING)
                try:
                    self._sink.close()
                except errors.CormorantError as error:
                    log.warning("dataset_not_sealed", reason=str(error))
            raise

    def _serve(self) -> None:
        while True:
            self._heartbeat.enter(Phase.WAITING)
            self._timing.rest(IDLE)
            if self._sink is not None and not self._uplink.has_message(_IDLE_S):
                self._sink.flush()  # nothing to do for a while: what was appended need not wait for a full shard
            message = self._uplink.recv()
            if isinstance(message, messages.Finish):
                self._finish(saves=message.saves)
                return
            try:
                if isinstance(message, messages.Reseed):
                    self._reseed(message)
                elif message.episodes:
                    self._play(message)
                else:
                    self._fill(message)
            except Stopped:
                self._finish()
                return
            # What was offered during the batch need not wait for the next ticket: the queue may be full for long.
            with self._boundary:
                self.collector.weights.apply()

    def _fill(self, ticket: messages.Ticket) -> None:
        self._timing.rest(WEIGHTS)
        block = self._uplink.block(ticket, self._layout)
        version = PolicyVersion(ticket.version)
        self.collector.weights.wait_until_offered(version, _OFFER_TIMEOUT_S)
        with self._boundary:
            self.collector.weights.apply()
            self._heartbeat.enter(Phase.STEPPING)
            self.collector.gate.ticket = ticket.number
            filled = self.collector.fill(block, ticket.num_frames)
            self.collector.gate.ticket += 1  # what a script collects before the next ticket is not sealed
            if self._sink is not None:
                self._heartbeat.enter(Phase.STORING)
                self._timing.rest(STORE)
                self._sink.append(block, filled.moments)
            if self._overrides.on_batch is not None:
                self._heartbeat.enter(Phase.STORING)
                self._timing.rest(STORE)
                self._overrides.on_batch(block)
        timing = self._timing.take()
        versions = block.versions
        acted = versions[versions != RANDOM_VERSION]
        self._uplink.send(
            messages.Sealed(
                number=ticket.number,
                num_frames=filled.num_frames,
                num_rows=block.num_rows,
                num_ends=block.num_ends,
                min_version=int(acted.min()) if acted.size else RANDOM_VERSION,
                max_version=int(acted.max()) if acted.size else RANDOM_VERSION,
                random_frames=versions.size - acted.size,
                agent_steps=block.agent_steps,
                episodes=filled.episodes,
                timing=timing,
                durable_frames=self._sink.durable_frames if self._sink is not None else 0,
                env_restarts=self.collector.env_restarts,
                next_trajectory=self.collector.trajectories.next_id,
                moments=filled.moments,
            )
        )

    def _play(self, ticket: messages.Ticket) -> None:
        """Play one ticket's episodes of an evaluation, and make their results durable."""
        block = self._uplink.block(ticket, self._layout)
        block.begin(0)
        with self._boundary:
            self._heartbeat.enter(Phase.STEPPING)
            self._timing.begin()
            played = self._player.play(ticket.episodes)
            self._heartbeat.enter(Phase.STORING)
            self._timing.rest(STORE)
            self._player.record(played)
        version = self.collector.weights.version
        self._uplink.send(
            messages.Sealed(
                number=ticket.number,
                num_frames=len(played),
                min_version=version,
                max_version=version,
                episodes=Episodes(
                    returns=[episode.total for episode in played],
                    lengths=[episode.length for episode in played],
                    num_terminated=sum(episode.terminated for episode in played),
                ),
                timing=self._timing.take(),
                num_steps=sum(episode.length for episode in played),
            )
        )

    def _reseed(self, message: messages.Reseed) -> None:
        """Build the environments again. What goes wrong ends this worker: its replacement begins with the new seed."""
        self._heartbeat.enter(Phase.BUILDING)
        self._timing.rest(BUILD)
        place = self._place = replace(message.place, num_threads=self._place.num_threads)
        with self._boundary:
            seed_globals(place)
            rebuild(self.collector, self._job, place, self._overrides)
            if place.warmup_frames >= 0:
                self.collector.first_frames.left = place.warmup_frames
        self._uplink.send(messages.Reply(number=message.number))

    def _noting(self, phase: Phase) -> Callable[[bool], None]:
        """Tells whether the stepping thread is in a phase, or steps."""
        return lambda is_in_it: self._heartbeat.enter(phase if is_in_it else Phase.STEPPING)

    def _finish(self, *, saves: bool = False) -> None:
        self._heartbeat.enter(Phase.STORING)
        self._timing.rest(STORE)
        if self._sink is not None:
            self._sink.close()
        state = b""
        if saves:
            try:
                with self._boundary:
                    state = self.collector.state()
            except Exception as error:  # noqa: BLE001  # an environment's own get_state may raise anything
                log.warning("state_not_saved", reason=f"{type(error).__name__}: {error}")
        self.collector.close()
        self._uplink.send(messages.Finished(state=state))

    # -- other threads -----------------------------------------------------------------------------------------

    def _answer(self, command: messages.Command, payload: memoryview) -> bytes:
        if command is not messages.PlainCommand.STOP and not isinstance(command, messages.AssignServers):
            self._serving.wait()  # bounded by the fleet's limit on starting
        match command:
            case messages.PlainCommand.PAUSE:
                gate = self.collector.gate
                gate.pause()
                while self._boundary.locked() and not gate.wait_until_paused(0.005):
                    pass  # bounded by the environments' time limits; the fleet's own limit names this worker sooner
            case messages.PlainCommand.RESUME:
                self.collector.gate.resume()
            case messages.Seal():
                gate = self.collector.gate
                gate.sealed_through = max(gate.sealed_through, command.ticket)
            case messages.PlainCommand.STOP:
                if self._weights is None:
                    os._exit(0)
                self.collector.gate.stop()
            case messages.AssignServers():
                self._servers.assign(command.servers)
            case messages.Look():
                return self.collector.look(command.column, command.leaf).tobytes()
            case messages.Call():
                with self._between_batches() as collector:
                    function = cloudpickle.loads(command.function)
                    called: bytes = cloudpickle.dumps(function(self._place, self._overrides, collector))
                    return called
            case messages.PlainCommand.SAVE:
                with self._between_batches() as collector:
                    return collector.state()
            case messages.Restore():
                with self._between_batches() as collector:
                    collector.restore(
                        bytes(payload), first_trajectory=command.first_trajectory, rewinds=command.rewinds
                    )
                    if self._sink is not None:
                        self._sink.go_on(collector.trajectories.ids, collector.trajectories.lengths)
            case _:
                return super()._answer(command, payload)
        return b""

    @contextmanager
    def _between_batches(self) -> Iterator[Collector]:
        if not self._boundary.acquire(timeout=_HELD_TIMEOUT_S):
            raise errors.StateError(f"the batch under way did not end within {_HELD_TIMEOUT_S:.0f} s")
        try:
            yield self.collector
        finally:
            self._boundary.release()


def _open_sink(begin: messages.Begin, start: messages.Start, collector: Collector, layout: Layout) -> "ShardWriter":
    # Imported by those who have a dataset: pyarrow takes a while to load.
    from cormorant_worker.sinks.dataset import open_dataset
    from cormorant_worker.sinks.description import describe_job

    observation, action = collector.spaces
    dataset = open_dataset(begin.dataset_uri, describe_job(start.job, layout, observation, action))
    return dataset.writer(start.place.attempt_name, layout, seal_after_s=begin.seal_after_s)


def forward_logs(uplink: Uplink) -> None:
    """Send log events to the fleet, which knows where the user reads them, as plain data."""

    def forward(_: object, level: str, event: MutableMapping[str, Any]) -> str:
        fields = {}
        for key, value in event.items():
            if key != "event":
                # A user's field never takes the place of one that the fleet fills.
                name = str(_plain(key))
                fields[f"env_{name}" if name in _OUR_FIELDS else name] = _plain(value)
        known = level if level in _LEVELS else "error" if level == "exception" else "info"
        uplink.send(messages.Logged(level=known, event=str(_plain(event.get("event", ""))), fields=fields))
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, forward])


_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_OUR_FIELDS = frozenset({"worker", "event", "level", "timestamp"})


def _plain(value: object) -> str | int | float | bool | None:
    """A value that every process can read: the fleet imports no class of a user's, and runs nothing of theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[return-value]  # as the line says
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # a user's __repr__ may raise anything
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


def describe_failure(error: Exception, *, acts_as_published: bool = False) -> messages.Failed:
    """Describe the error that ends this worker. `acts_as_published`: so that the next version may fix the error."""
    known = isinstance(error, errors.CormorantError)
    # Another process of this machine may do better, but not with environments that never made a step; a part of the
    # dataset that is another's costs an attempt.
    is_passing = (
        isinstance(error, errors.PartExists)
        or (isinstance(error, errors.EnvCrashed) and not isinstance(error, errors.EnvRaised) and error.has_stepped)
        or (isinstance(error, errors.InvalidAction) and acts_as_published)
    )
    return messages.Failed(
        kind=type(error).__name__,
        message=str(error) if known else f"{type(error).__name__}: {error}",
        traceback=traceback.format_exc(),
        is_final=known and not is_passing,
        may_pass=isinstance(error, errors.EnvCrashed | errors.DeviceUnavailable)
        and not isinstance(error, errors.EnvRaised),
    )
