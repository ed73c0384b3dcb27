"""A fleet between two batches, and waiting for its workers' answers: what callers' threads do with a crew.

All of it wants the fleet's condition held, and lets go of it while it waits.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.state import read_metadata
from cormorant_worker.errors import ControlTimeout, FleetError, FleetInterrupted, StateError
from cormorant_worker.fleet.batch_queue import BatchQueue
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.scheduler import Scheduler, Slot
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.fleet.worker_pool import WorkerPool
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import Reply

_POLL_S = 0.2
_LONGEST_START_S = 86_400.0
"""Where a manifest sets no limit to the start."""


class Quiesce:
    """Brings a fleet to a batch boundary, and saves, restores or reseeds it there."""

    def __init__(
        self,
        changed: threading.Condition,
        crew: WorkerPool,
        schedule: Scheduler,
        deliveries: BatchQueue,
        options: FleetOptions,
        *,
        wake: Callable[[], None],
    ) -> None:
        """Take the fleet's parts.

        Args:
            changed: guards the others, and is notified when they change.
            crew: the workers.
            schedule: who may collect.
            deliveries: what is collected.
            options: for limits.
            wake: makes the fleet's thread look at once.
        """
        self._changed = changed
        self._crew = crew
        self._schedule = schedule
        self._deliveries = deliveries
        self._options = options
        self._wake = wake
        self._holders = 0

    @property
    def is_wanted(self) -> bool:
        """True while no ticket may be handed out."""
        return self._holders > 0

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Inside, every place is filled and no worker holds a ticket: batches under way are finished first, even in a
        paused fleet.

        Raises:
            ControlTimeout: they did not end in time.
        """
        crew, timeout_s = self._crew, self._options.control_timeout_s
        crew.raise_error()
        self._holders += 1
        try:
            if crew.is_paused:
                crew.open_gates()
            is_still = self.wait_until(
                lambda: crew.error is not None or (crew.is_idle and (crew.is_complete or self._schedule.is_done)),
                time.monotonic() + timeout_s,
            )
            crew.raise_error()
            if not is_still:
                raise ControlTimeout(
                    f"batches under way did not end within {timeout_s:.0f} s (control_timeout_s); {crew.describe()}"
                )
            yield
        finally:
            self._holders -= 1
            if crew.is_paused:
                crew.shut_gates()
            self._wake()

    # -- between batches ---------------------------------------------------------------------------------------

    def save(self) -> FleetState:
        """Everything that going on from here needs. Between batches."""
        crew = self._crew
        if self._schedule.is_done:
            states = self._final_states()
        else:
            replies = self._all_answers(self.ask_all("save"), "save its state")
            states = {slot: reply.state for slot, reply in replies.items()}
        return FleetState(
            frames=self._schedule.landed_frames,
            attempts={f"{group}-{index}": crew.lineage.attempts[group, index] for group, index in states},
            run=crew.lineage.run,
            epoch=crew.lineage.epoch,
            dataset=self._dataset,
            written={f"{group}-{index}": crew.lineage.written[group, index] for group, index in states},
            version=crew.version,
            weights=crew.shelf.to_bytes(),
            seed=crew.seed,
            workers={f"{group}-{index}": state for (group, index), state in states.items()},
        )

    def _final_states(self) -> dict[Slot, bytes]:
        """What workers saved when everything was collected, before they ended."""
        crew, timeout_s = self._crew, self._options.control_timeout_s
        if not self.wait_until(lambda: crew.is_empty or not self._schedule.is_done, time.monotonic() + timeout_s):
            raise ControlTimeout(f"workers did not end within {timeout_s:.0f} s; {crew.describe()}")
        states = {slot: crew.final_states.get(slot, b"") for slot in crew.places}
        if not self._schedule.is_done:
            raise StateError("a worker was lost, and its frames are collected again; call again")
        if missing := ["{}-{}".format(*slot) for slot, state in states.items() if not state]:
            raise StateError(f"{', '.join(missing)} ended and could not be saved before")
        return states

    def restore(self, saved: FleetState, *, publish: Callable[[WeightsBlob, PolicyVersion], object]) -> None:
        """Go on from what `save` gave. Between batches.

        Environments that were saved go back to where they were, unless the dataset has frames of their slot that came
        later: those would be written twice. All others begin anew, from seeds that no worker of this job had.

        Raises:
            StateError: it does not fit this fleet.
            WorkerFailed, ControlTimeout: environments could not be built again, or not in time.
        """
        crew = self._crew
        names = {f"{group}-{index}": (group, index) for group, index in crew.places}
        if set(saved.workers) != set(names):
            raise StateError(
                f"the state holds workers {sorted(saved.workers)}, this fleet has {sorted(names)}; "
                "use the same job and number of workers"
            )
        if self._schedule.is_done or not crew.is_complete:
            raise StateError("this fleet has collected all its frames; restore the state into a new one")
        told = {name: read_metadata(data) for name, data in saved.workers.items()}
        is_last = {slot: crew.lineage.is_last(saved, slot, self._dataset) for slot in names.values()}
        crew.lineage.join(saved)
        collected = self._schedule.landed_frames
        self._deliveries.discard("restore")
        crew.seed = saved.seed
        if saved.weights and saved.version > crew.version:
            publish(WeightsBlob.from_bytes(saved.weights), saved.version)
        members = dict(crew.members)
        rewinds = {
            slot: told[name]["envs_saved"] and (not self._dataset or is_last[slot]) for name, slot in names.items()
        }
        streams = {
            slot: crew.lineage.begin(replace(member.stream, seed=saved.seed, warmup_frames=-1))
            for slot, member in members.items()
            if not (rewinds[slot] and is_last[slot])
        }
        self._begin_anew({slot: members[slot] for slot in streams if not rewinds[slot]}, streams)
        asked = {}
        for name, slot in names.items():
            first = streams[slot].first_trajectory if slot in streams else 0
            number = crew.request(
                members[slot], "restore", state=saved.workers[name], first_trajectory=first, rewinds=rewinds[slot]
            )
            asked[number] = members[slot]
            crew.lineage.owe(slot, told[name]["warmup_left"])
        self._all_answers(asked, "restore its state")
        self._schedule.accepted_frames = saved.frames if crew.store is None else collected

    def _begin_anew(self, members: Mapping[Slot, WorkerHandle], streams: Mapping[Slot, WorkerPlace]) -> None:
        crew = self._crew
        asked = {crew.begin_anew(member, streams[slot]): member for slot, member in members.items()}
        self._all_answers(asked, "begin anew", timeout_s=self._options.startup_timeout_s)
        for member in members.values():
            self._deliveries.count_dropped("restore", member.drop_ahead())

    @property
    def _dataset(self) -> str:
        return self._crew.store.uri if self._crew.store is not None else ""

    def reseed(self, seed: int) -> tuple[str, ...]:
        """Have every worker begin anew. Between batches. Returns those that have.

        Raises:
            FleetError: everything is collected.
            WorkerFailed, ControlTimeout: environments could not be built again, or not in time.
        """
        crew = self._crew
        if self._schedule.is_done or not crew.is_complete:
            raise FleetError("this fleet has collected all its frames; there is nothing left to seed")
        warmup: dict[Slot, int] = {}
        if not self._deliveries.has_lent and crew.store is None:
            # Nobody has seen a batch: the seed rules the first one.
            self._deliveries.discard("seed")
            self._schedule.accepted_frames = crew.found_frames
            warmup = crew.lineage.owe_all()
        asked = crew.reseed(seed, warmup)
        replies = self.answers(asked, "begin anew", timeout_s=self._options.startup_timeout_s)
        crew.raise_error()
        # Of those that died meanwhile, the replacements begin with the new seed.
        anew = [member for member in asked.values() if member.place in replies]
        for member in anew:
            self._deliveries.count_dropped("seed", member.drop_ahead())
        return tuple(sorted(member.name for member in anew))

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait_until(self, predicate: Callable[[], bool], deadline: float) -> bool:
        """Wait until something holds; False when it does not by `deadline`, by time.monotonic()."""
        while not predicate():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, _POLL_S))
        return True

    def await_crew(self, what: str) -> None:
        """Wait until every place is filled and nobody else is left, or everything is collected. Where somebody else
        brings the places, one that is filled is enough.

        Raises:
            WorkerFailed, ControlTimeout: workers could not start, or not in time.
            FleetInterrupted: `options.should_stop` says so.
        """
        crew, options = self._crew, self._options
        timeout_s = crew.job.spec.run_policy.startup_deadline_seconds or _LONGEST_START_S
        timeout_s = timeout_s if options.waits_for_places else options.startup_timeout_s

        def is_there() -> bool:
            return crew.has_begun if options.waits_for_places else crew.is_complete

        in_time = self.wait_until(
            lambda: crew.error is not None or self._schedule.is_done or is_there() or options.should_stop(),
            time.monotonic() + timeout_s,
        )
        crew.raise_error()
        if not is_there() and options.should_stop():
            raise FleetInterrupted(f"whoever waited for the fleet {what} does not wait any more")
        if not in_time:
            late = ", ".join(f"{group}-{index}" for group, index in crew.places if not crew.is_serving((group, index)))
            raise ControlTimeout(f"workers {late} took longer than {timeout_s:.0f} s {what}; {crew.describe()}")

    def ask_all(self, action: str) -> dict[int, WorkerHandle]:
        """Ask every worker for something. Returns who was asked, for `answers`."""
        return {self._crew.request(m, action): m for m in self._crew.members.values() if m.is_ready}

    def answers(self, asked: dict[int, WorkerHandle], what: str, *, timeout_s: float) -> dict[Slot, Reply]:
        """Wait for every worker's answer; one that died meanwhile needs none, nor does its replacement.

        Raises:
            ControlTimeout: one did not answer in time.
            StateError: one could not.
        """
        crew = self._crew

        def late() -> list[str]:
            return [m.name for n, m in asked.items() if crew.requests[n] is None and crew.members.get(m.place) is m]

        self.wait_until(lambda: not late(), time.monotonic() + timeout_s)
        names = ", ".join(late())
        replies = {m.place: reply for n, m in asked.items() if (reply := crew.requests.pop(n)) is not None}
        if names:
            raise ControlTimeout(f"{names} did not {what} within {timeout_s:.0f} s; {crew.describe()}")
        if errors := [f"{group}-{index}: {reply.error}" for (group, index), reply in replies.items() if reply.error]:
            raise StateError(f"workers could not {what}: {'; '.join(errors)}")
        return replies

    def _all_answers(self, asked: dict[int, WorkerHandle], what: str, *, timeout_s: float = 0.0) -> dict[Slot, Reply]:
        """As `answers`, when none may be missing; by default within `control_timeout_s`."""
        replies = self.answers(asked, what, timeout_s=timeout_s or self._options.control_timeout_s)
        if lost := [member.name for member in asked.values() if member.place not in replies]:
            raise StateError(f"{', '.join(lost)} ended and could not {what}; call again")
        return replies
