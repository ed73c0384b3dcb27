"""Operations between two batches, and waiting for workers' replies: code of callers' threads.

Call with the fleet's condition held; it is released while waiting.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog

from cormorant_worker.collect.state import read_metadata
from cormorant_worker.errors import (
    ControlTimeout,
    DeviceUnavailable,
    FleetClosed,
    FleetError,
    FleetInterrupted,
    StateError,
    WorkerFailed,
)
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.fleet_state import CURRENT, FleetState
from cormorant_worker.fleet.slot import Question, Slot, SlotState, WorkerHandle
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.fleet.turn.life import SlotLife
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker import messages

log = structlog.get_logger()

_LONGEST_START_S = 86_400.0
"""Where a manifest sets no limit to the start."""


class Quiesce:
    """Brings a fleet to a batch boundary, and saves, restores or reseeds it there."""

    def __init__(self, core: FleetCore, life: SlotLife) -> None:
        self._core, self._life = core, life
        self.holders = 0
        """Callers that are, or wait to be, between two batches: no ticket may be issued."""
        self._is_taken = False
        """One of them acts. Replies of two would wake them in any order: one's count, the other's environments."""

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Within the block, every slot is filled and no worker holds a ticket: current batches are finished first, even
        in a paused fleet. One caller at a time. Raises ControlTimeout, FleetClosed, and StateError for an evaluation.
        """
        core, slots, timeout_s = self._core, self._core.slots, self._core.options.control_timeout_s
        core.raise_error()
        if core.episodes is not None:
            raise StateError(
                "an evaluation has no state, and each of its episodes a seed of its own: it goes on from its results "
                "folder; start another one with other seeds in collection.episodes"
            )
        self.holders += 1
        try:
            if core.is_paused:
                core.slots.tell_all(messages.PlainCommand.RESUME)
            is_still = core.wait_for(
                lambda: (
                    core.error is not None
                    or core.is_closing
                    or (not self._is_taken and self._life.is_idle and (slots.is_complete or core.scheduler.is_done))
                ),
                timeout_s,
            )
            core.raise_error()
            if core.is_closing:
                raise FleetClosed("the fleet was closed")
            if not is_still:
                what = "another state, restore, seed or call" if self._is_taken else "batches under way"
                raise ControlTimeout(
                    f"{what} did not end within {timeout_s:.0f} s (control_timeout_s); {slots.describe()}"
                )
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False
        finally:
            self.holders -= 1
            if core.is_paused and not self.holders:
                core.slots.tell_all(messages.PlainCommand.PAUSE)
            core.waker.wake()

    # -- between batches ---------------------------------------------------------------------------------------

    def save(self) -> FleetState:
        """Everything needed to continue from here, but for the published weights. Call between batches."""
        core, timeout_s = self._core, self._core.options.control_timeout_s
        # Workers of a fleet that drains may stay until what is queued is settled: see `SlotLife.finish_idle`.
        if core.scheduler.is_done and not (core.scheduler.is_draining and core.slots.is_complete):
            # What they saved when everything was collected, before they ended.
            if not core.wait_for(lambda: core.slots.is_empty or not core.scheduler.is_done, timeout_s):
                raise ControlTimeout(f"workers did not end within {timeout_s:.0f} s; {core.slots.describe()}")
            states = {slot: slot.final_state or b"" for slot in core.slots.collecting}
            if not core.scheduler.is_done:
                raise StateError("a worker was lost, and its frames are collected again; call again")
            if missing := [slot.name for slot, state in states.items() if not state]:
                raise StateError(f"{', '.join(missing)} ended and could not be saved before")
        else:
            states = self.replies(core.slots.ask_all(messages.PlainCommand.SAVE), "save its state", needs_all=True)
        saved = FleetState(
            frames=core.scheduler.landed_frames,
            attempts={slot.name: slot.attempt for slot in states},
            run=core.lineage.run,
            epoch=core.lineage.epoch,
            dataset=core.dataset_uri,
            written={slot.name: slot.written for slot in states},
            version=core.offers.common_version,
            weights=b"",
            seed=self._life.seed,
            statistics={}
            if core.statistics is None
            else {**core.statistics.versions(), CURRENT: core.statistics.current},
            workers={slot.name: state for slot, state in states.items()},
        )
        for reason, workers in saved.not_saved.items():
            log.warning("environments_not_saved", workers=workers, reason=f"{reason}; they begin new episodes")
        return saved

    def restore(
        self,
        saved: FleetState,
        states: Mapping[str, Payload],
        *,
        weights: Sequence[tuple[PolicyVersion, WeightsBlob, Payload]],
    ) -> None:
        """Continue from a result of `save`, with each worker's state by name, and its publishes, oldest first. Call
        between batches. Saved environments are restored, unless the dataset has later frames of their slot, which would
        be written twice; all others get new seeds. Raises StateError where it does not fit, WorkerFailed and
        ControlTimeout where environments are not built again.
        """
        core = self._core
        names = {slot.name: slot for slot in core.slots.collecting}
        if set(saved.workers) != set(names):
            raise StateError(
                f"the state holds workers {sorted(saved.workers)}, this fleet has {sorted(names)}; "
                "use the same job and number of workers"
            )
        if core.scheduler.is_done or not core.slots.is_complete:
            raise StateError("this fleet has collected all its frames; restore the state into a new one")
        told = {name: read_metadata(data) for name, data in saved.workers.items()}
        is_last = {slot: core.lineage.is_last(saved, slot, core.dataset_uri) for slot in names.values()}
        core.lineage.join(saved, core.slots.collecting)
        # A dataset has these, whatever becomes of the restore. A worker that is lost meanwhile changes the count, too.
        ahead = core.scheduler.landed_frames - core.scheduler.accepted_frames if core.dataset is not None else 0
        core.queue.discard("restore")
        try:
            self._life.seed = saved.seed
            if core.statistics is not None and CURRENT in saved.statistics:
                core.statistics.reset(saved.statistics[CURRENT], saved.statistics)
                core.queue.forget_moments()
            for version, blob, payload in weights:
                if version > core.offers.version:
                    core.offers.publish(blob, version, payload)
            handles = {handle.slot: handle for handle in core.slots.workers if not handle.slot.is_server}
            commands, reseeded = {}, []
            for name, slot in names.items():
                rewinds, first = told[name]["envs_saved"] and (not core.dataset_uri or is_last[slot]), 0
                if not (rewinds and is_last[slot]):
                    place = replace(handles[slot].stream, seed=saved.seed, warmup_frames=-1)
                    stream = core.lineage.begin(slot, place)
                    first = stream.first_trajectory
                    if not rewinds:
                        reseeded.append((handles[slot], stream))
                commands[slot] = messages.Restore(first_trajectory=first, rewinds=rewinds)
            asked = [handle.reseed(stream) for handle, stream in reseeded]
            self.replies(asked, "reseed", timeout_s=core.options.startup_timeout_s, needs_all=True)
            for handle, _ in reseeded:
                core.queue.count_dropped("restore", handle.drop_ahead())
            asked = [handles[slot].ask(commands[slot], states[name]) for name, slot in names.items()]
            for name, slot in names.items():
                slot.warmup_frames = max(0, told[name]["warmup_left"])
            self.replies(asked, "restore its state", needs_all=True)
        finally:
            core.scheduler.accepted_frames += ahead
        if core.dataset is None:
            core.scheduler.accepted_frames = saved.frames

    def reseed(self, seed: int) -> tuple[str, ...]:
        """Reseed every worker. Call between batches. Returns the reseeded workers."""
        core = self._core
        if core.scheduler.is_done or not core.slots.is_complete:
            raise FleetError("this fleet has collected all its frames; there is nothing left to seed")
        is_first = not core.queue.has_lent and core.dataset is None
        if is_first:
            # No batch was taken yet: the seed rules the first one.
            core.queue.discard("seed")
            core.scheduler.accepted_frames = core.found_frames
            for slot in core.slots.collecting:
                slot.warmup_frames = slot.warmup_share
        self._life.seed = seed
        core.events.note("seeded", reason=f"seed {seed}")
        asked = []
        for handle in core.slots.workers:
            if handle.is_ready and not handle.slot.is_server:
                warmup_frames = handle.slot.warmup_share if is_first else -1
                stream = replace(handle.stream, seed=seed, warmup_frames=warmup_frames)
                asked.append(handle.reseed(stream))
        self.replies(asked, "reseed", timeout_s=core.options.startup_timeout_s)
        core.raise_error()
        # Of those that died meanwhile, the replacements begin with the new seed.
        reseeded = [question.handle for question in asked if question.reply is not None]
        for handle in reseeded:
            core.queue.count_dropped("seed", handle.drop_ahead())
        return tuple(sorted(handle.name for handle in reseeded))

    def call(self, call: messages.Call) -> dict[str, bytes]:
        """Call a function in each worker between batches, and return its results, pickled."""
        core = self._core
        if core.scheduler.is_done or not core.slots.is_complete:
            raise FleetError("this fleet has collected all its frames, and its workers have ended")
        results = self.replies(core.slots.ask_all(call), "call a function", needs_all=True)
        return {slot.name: result for slot, result in results.items()}

    # -- waiting -----------------------------------------------------------------------------------------------

    def await_workers(self, what: str) -> None:
        """Wait until every slot is filled (one, with `waits_for_places`) and no other worker is left, or all is
        collected.
        """
        core, options = self._core, self._core.options
        timeout_s = core.job.spec.run_policy.startup_deadline_seconds or _LONGEST_START_S
        timeout_s = timeout_s if options.waits_for_places else options.startup_timeout_s

        def is_there() -> bool:
            if not options.waits_for_places:
                return core.slots.is_complete
            is_leaving = core.slots.count(SlotState.LEAVING, SlotState.FINISHING) > 0
            return core.slots.count(SlotState.WORKING) > 0 and not is_leaving

        def is_over() -> bool:
            return core.error is not None or core.is_closing or core.scheduler.is_done or options.should_stop()

        in_time = core.wait_for(lambda: is_there() or is_over(), timeout_s)
        core.raise_error()
        if is_there():
            return
        if core.is_closing:
            raise FleetClosed(f"the fleet was closed while waiting for workers {what}")
        if options.should_stop():
            raise FleetInterrupted(f"waiting for the fleet {what} was cancelled")
        if in_time:
            return  # everything is collected
        if core.misplaced:
            raise WorkerFailed(core.misplaced, kind=DeviceUnavailable.__name__)
        late = ", ".join(slot.name for slot in core.slots.wanted if slot.state is not SlotState.WORKING)
        raise ControlTimeout(f"workers {late} took longer than {timeout_s:.0f} s {what}; {core.slots.describe()}")

    def replies(
        self, asked: Sequence[Question], what: str, *, timeout_s: float | None = None, needs_all: bool = False
    ) -> dict[Slot, bytes]:
        """Wait for workers' replies and return their bytes, by default within `control_timeout_s`. Workers that died,
        and their replacements, are left out; with `needs_all` that is an error.
        """

        def late() -> list[str]:
            return [question.handle.name for question in asked if not (question.reply or question.handle.is_gone)]

        limit_s = self._core.options.control_timeout_s if timeout_s is None else timeout_s
        self._core.wait_for(lambda: not late(), limit_s)
        if names := late():
            doing = self._core.slots.describe()
            raise ControlTimeout(f"{', '.join(names)} did not {what} within {limit_s:.0f} s; {doing}")
        replies = {question.handle.slot: question.reply for question in asked if question.reply is not None}
        if errors := [f"{slot.name}: {reply.error}" for slot, reply in replies.items() if reply.error]:
            raise StateError(f"workers could not {what}: {'; '.join(errors)}")
        lost = [question.handle.name for question in asked if question.reply is None]
        if lost and needs_all:
            raise StateError(f"{', '.join(lost)} ended and could not {what}; call again")
        return {slot: reply.state for slot, reply in replies.items()}

    def ask(self, handle: WorkerHandle, command: messages.Command, what: str, *, timeout_s: float) -> bytes:
        replies = self.replies([handle.ask(command)], what, timeout_s=timeout_s)
        if not replies:
            raise FleetError(f"worker {handle.name} ended and could not {what}; ask its replacement")
        return replies[handle.slot]
