"""The workers of a local fleet: started, listened to, watched, buried and replaced. Not thread-safe.

The fleet's thread calls it with the fleet's condition held; it never waits.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import structlog

from cormorant_contract.job import CollectorJob
from cormorant_worker.engine.deliveries import Deliveries, Part
from cormorant_worker.engine.events import Events
from cormorant_worker.engine.lineage import Lineage
from cormorant_worker.engine.link import Engine
from cormorant_worker.engine.member import Member, TicketOut, new_member
from cormorant_worker.engine.messages import (
    Applied,
    Begin,
    Failed,
    Finish,
    Finished,
    Leaving,
    Logged,
    Ready,
    Reply,
    Request,
    Reseed,
    Sealed,
    Start,
    Ticket,
)
from cormorant_worker.engine.options import FleetOptions
from cormorant_worker.engine.places import Places
from cormorant_worker.engine.published import Published, Shelf
from cormorant_worker.engine.pulse import Phase
from cormorant_worker.engine.schedule import Grant, Round, Schedule, Slot
from cormorant_worker.engine.tally import RestartReason, Tally
from cormorant_worker.errors import CormorantError, WorkerFailed
from cormorant_worker.place import WorkerPlace
from cormorant_worker.weights import INITIAL_VERSION, PolicyVersion
from cormorant_worker.weights_blob import WeightsBlob

if TYPE_CHECKING:
    from cormorant_worker.engine.store import DatasetRoot

log = structlog.get_logger()

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0


class Crew:
    """Every worker of one fleet, by place."""

    def __init__(
        self,
        job: CollectorJob,
        options: FleetOptions,
        engine: Engine,
        schedule: Schedule,
        deliveries: Deliveries,
        events: Events,
    ) -> None:
        self.job = job
        self.members: dict[Slot, Member] = {}
        self.places = Places(job)
        """Places that are to be filled."""
        self.ready: Ready | None = None
        """What the first worker said of itself; all others must agree."""
        self.error: CormorantError | None = None
        """Why the fleet cannot go on."""
        self.is_closing = False
        self.is_paused = options.starts_paused
        self.shelf = Shelf(engine)
        """What was published."""
        self.requests: dict[int, Reply | None] = {}
        """Requests under way, and their replies once they came."""
        self.seed = job.spec.collection.seed
        """What workers that start from now on derive their streams from."""
        self.restarts: dict[Slot, int] = {}
        self._failures: dict[Slot, int] = {}
        """By place: failures in a row."""
        self.tally = Tally()
        self._options = options
        self.engine = engine
        self._hang_limit_s = options.hang_limit_s(job)
        self._schedule = schedule
        self._deliveries = deliveries
        self._events = events
        self.store: DatasetRoot | None = _dataset_root(job, options)
        self.found_frames = options.floor_frames if self.store is None else self.store.frames
        """Frames that counted before this fleet collected any: those of the dataset, or the options' floor."""
        self.lineage = Lineage(
            epoch=options.epoch if self.store is None else self.store.epoch,
            written={} if self.store is None else self.store.written,
            warmup_frames=max(0, job.spec.collection.init_random_frames - self.found_frames),
        )
        self._respawn_at: dict[Slot, float] = {}
        self._num_threads = 0
        self._numbers = 0

    def raise_error(self) -> None:
        """Raise why the fleet cannot go on, if it cannot."""
        if self.error is not None:
            raise self.error

    # -- places ------------------------------------------------------------------------------------------------

    def resize(self, workers: int | Mapping[str, int]) -> None:
        """Say how many places there are, in all or by group: see `Places.resize`.

        Raises:
            FleetError: no such group, a negative size, or nobody would be left.
        """
        self._leave(self.places.resize(workers))

    def retire(self, name: str) -> None:
        """Give a worker's place up until its group's size is raised. It finishes what it holds.

        Raises:
            FleetError: no such worker, or nobody would be left.
        """
        self._leave(self.places.give_up(name))

    def _leave(self, given_up: Collection[Slot]) -> None:
        for slot in given_up:
            if (member := self.members.get(slot)) is not None:
                member.is_leaving = True
            self._respawn_at.pop(slot, None)
            self._deliveries.complete(self._schedule.forget_member(slot))
        if self._deliveries.slots is not None:
            self._deliveries.slots.resize(self._slot_limit(), at_least=self._fewest_slots())

    def _slot_limit(self) -> int:
        """Two blocks a worker, and the queue."""
        queue = self.job.spec.output.queue
        per_round = len(self.places) if self._schedule.mode == "sync" else 1
        return 2 * len(self.places) + (queue.capacity_batches * per_round if queue else 0)

    def _fewest_slots(self) -> int:
        """With less no round can begin."""
        return len(self.places) if self._schedule.mode == "sync" else 1

    def is_serving(self, slot: Slot) -> bool:
        """True when a place's worker may hold tickets."""
        member = self.members.get(slot)
        return member is not None and member.is_synced

    def serving(self) -> list[Member]:
        """Workers that take weights."""
        return [member for member in self.members.values() if member.is_ready and not member.is_leaving]

    @property
    def is_complete(self) -> bool:
        """True when every place has a worker that may hold tickets, and nobody else is left."""
        return set(self.members) == set(self.places) and all(map(self.is_serving, self.places))

    @property
    def has_begun(self) -> bool:
        """True when some place has a worker that may hold tickets, and whoever leaves has left."""
        stays = all(slot in self.places and not member.is_leaving for slot, member in self.members.items())
        return stays and any(map(self.is_serving, self.places))

    @property
    def is_idle(self) -> bool:
        """True when no worker holds a ticket."""
        return not any(member.tickets for member in self.members.values())

    def describe(self) -> str:
        """Who does what, for messages."""
        found = [f"{m.name} is {m.link.describe_doing()}" for _, m in sorted(self.members.items())]
        return ", ".join(found) or "there are no workers"

    # -- starting ----------------------------------------------------------------------------------------------

    def start_missing(self, now: float) -> None:
        """Start a worker in every place that has none and need not wait."""
        if self.error is not None or self.is_closing or self._schedule.is_done:
            return
        for slot in self.places:
            if slot not in self.members and now >= self._respawn_at.get(slot, 0.0):
                self._respawn_at.pop(slot, None)
                try:
                    self._spawn(slot)
                except CormorantError as error:
                    self.error = error
                    return

    def _spawn(self, slot: Slot) -> None:
        group, index = slot
        names = [known.name for known in self.job.spec.worker_groups]
        first_free = self.store.next_attempt(slot) if self.store is not None else 0
        place = WorkerPlace(
            group=group,
            index=index,
            group_number=names.index(group),
            num_groups=len(names),
            warmup_frames=self.lineage.warmup_of(slot, tuple(self.places)),
            max_threads=self.engine.cpus_for(len(self.places)),
            num_threads=self._num_threads,
            device=self._options.device or _device_of(self.job, group),
            seed=self.seed,
        )
        place = self.lineage.begin(place, first_free=first_free, batch_ids=self._batch_ids)
        parts = self._options.parts_of(index)
        start = Start(job=self.job, place=place, frames_per_batch=self._schedule.frames_per_batch, parts=parts)
        self.members[slot] = new_member(self.engine.start(start))

    @property
    def _batch_ids(self) -> int:
        """Trajectory ids that one batch can use: one a frame, and new ones for all environments twice."""
        return self._schedule.frames_per_batch + 2 * (self.ready.layout.num_envs if self.ready is not None else 0)

    def _welcome(self, member: Member, ready: Ready) -> None:
        if self.ready is None:
            self._learn(ready)
            if self.error is not None:
                return
        elif ready.layout != self.ready.layout:
            self.error = WorkerFailed(
                f"worker {member.name} makes batches of another layout than the first one: {ready.layout} instead of "
                f"{self.ready.layout}; environments and policies must not differ between workers"
            )
            return
        member.is_ready = True
        member.kept_version = PolicyVersion(ready.kept_version)
        # From here on it is held to the hang limit, which its start may have exceeded.
        member.last_progress = time.monotonic()
        if self._schedule.is_done:
            return  # the dataset had all frames already: `finish_idle` sends it home
        member.send(Begin(dataset_uri=self.store.uri if self.store is not None else ""))
        # The reply comes when the worker has opened its dataset and has the weights.
        member.sync_request = self._offer_everything(member) or self.request(member, "resume")
        if self.is_paused:
            self._tell(member, "pause")
        log.info("worker_ready", worker=member.name, seconds=round(time.monotonic() - member.started, 2))

    def _learn(self, ready: Ready) -> None:
        """The first worker has started: memory and dataset can be laid out."""
        self.ready = ready
        self._num_threads = ready.num_threads
        if self._options.whole_rows:
            self._schedule.round_up(ready.layout.num_envs, num_workers=len(self.places))
        try:
            self._deliveries.slots = self.engine.make_store(ready.layout, self._slot_limit())
            self._deliveries.slots.resize(self._slot_limit(), at_least=self._fewest_slots())
        except CormorantError as error:
            self.error = error
            return
        if self.store is not None:
            try:
                self.store.open(self.job, ready)
            except CormorantError as error:
                self.error = error
                return
        self._schedule.accepted_frames = self.found_frames

    # -- listening ---------------------------------------------------------------------------------------------

    def sources(self) -> Iterator[Connection]:
        """What to wait on, beside the engine's own wake-ups."""
        for member in self.members.values():
            yield from member.link.sources()

    def listen(self, ready: Sequence[object]) -> None:
        """Read whatever has come, and bury who is gone."""
        for slot, member in list(self.members.items()):
            for message in member.link.receive(ready):
                self._handle(slot, member, message)
                if self.members.get(slot) is not member:
                    break
            if self.members.get(slot) is member and not member.link.is_open:
                self._bury(slot, member)

    def _handle(self, slot: Slot, member: Member, message: object) -> None:
        match message:
            case Sealed():
                self._seal(slot, member, message)
            case Ready():
                self._welcome(member, message)
            case Reply():
                self._note_reply(member, message)
            case Applied():
                member.version = PolicyVersion(message.version)
                self._events.note("applied", worker=member.name, version=message.version)
            case Logged():
                getattr(log, message.level, log.info)(message.event, **{**message.fields, "worker": member.name})
            case Leaving():
                log.info("worker_leaving", worker=member.name)
                member.is_leaving = True
            case Finished():
                member.has_finished = True
                member.durable_frames = message.durable_frames
            case Failed():
                self._fail(slot, member, message)

    def _seal(self, slot: Slot, member: Member, sealed: Sealed) -> None:
        out = member.tickets.pop(sealed.number)
        member.landed_frames += sealed.num_frames
        member.durable_frames = sealed.durable_frames
        member.env_restarts = sealed.env_restarts
        self.lineage.landed(slot, sealed)
        self.tally.seal(sealed)
        self._events.note(
            "sealed", worker=member.name, frames=sealed.num_frames, version=sealed.min_version, sealed=sealed
        )
        for late in self._deliveries.land(out.round, slot, Part(sealed, out.slot, member.attempt)):
            self._seal_early(self.members[late], out.round)

    def note_lent(self, frames: int, min_version: int) -> None:
        """A consumer takes a round in which a version is the oldest that acted."""
        staleness = self.shelf.common_version - min_version if min_version >= 0 else 0
        self._events.note("lent", frames=frames, version=min_version, staleness=max(0, staleness))

    def _seal_early(self, member: Member, found: Round) -> None:
        for number, out in member.tickets.items():
            if out.round is found:
                member.request(Request(number=self._next_number(), action="seal", ticket=number))

    def _note_reply(self, member: Member, reply: Reply) -> None:
        if reply.number in self.requests:
            self.requests[reply.number] = reply
        elif reply.error:
            log.warning("request_refused", worker=member.name, reason=reply.error)
        version = member.offers.pop(reply.number, INITIAL_VERSION)
        if version and reply.error:
            member.refusal = (version, reply.error)
        if reply.number == member.sync_request:
            member.is_synced = True
            self._events.note("worker_ready", worker=member.name, version=member.version)
            self.requests.pop(reply.number, None)
            if reply.error:
                self.error = WorkerFailed(f"worker {member.name} refused the current weights: {reply.error}")

    # -- talking -----------------------------------------------------------------------------------------------

    def hand_out(self, grant: Grant) -> None:
        """Give a worker a ticket and a slot."""
        self._deliveries.make_slot()
        assert self._deliveries.slots is not None
        member = self.members[grant.slot]
        slot, memory = self._deliveries.slots.lend(member.link.pid)
        number = self._next_number()
        member.tickets[number] = TicketOut(grant.round, slot, grant.num_frames)
        ticket = Ticket(
            number=number,
            slot=slot,
            slot_is_new=memory is not None,
            num_frames=grant.num_frames,
            version=self.shelf.version_of(grant.slot),
        )
        member.send_ticket(ticket, memory)

    def request(self, member: Member, action: str, *, state: bytes = b"", **details: Any) -> int:
        """Ask a worker for something; the reply will be in `requests` under the number that is returned."""
        number = self._next_number()
        self.requests[number] = None
        payload = self.engine.share(state) if state else None
        # A worker that is dying hears nothing and answers nothing: whoever waits sees that it is no member any more.
        asked = Request(number=number, action=action, size_bytes=len(state), **details)
        member.request(asked, payload)
        if payload is not None:
            payload.close()
        return number

    def reseed(self, seed: int) -> dict[int, Member]:
        """Have every worker, and those that come later, begin anew from a seed. None may hold a ticket.

        Returns:
            Who was asked, by the number under which the reply will be in `requests`.
        """
        self.seed = seed
        self._events.note("seeded", reason=f"seed {seed}")
        members = [member for member in self.members.values() if member.is_ready]
        return {self.begin_anew(member, replace(member.stream, seed=seed)): member for member in members}

    def begin_anew(self, member: Member, stream: WorkerPlace) -> int:
        """Have a worker begin anew from the seeds of a place. Returns the number of the reply."""
        number = self._next_number()
        self.requests[number] = None
        member.stream = stream
        member.send(Reseed(number=number, place=stream))
        return number

    def drop_frames_ahead(self, member: Member, reason: str) -> None:
        """A worker has begun anew: what its environments were ahead of its last batch will not be delivered."""
        ahead = max(0, member.stepped_frames - member.landed_frames - member.dropped_frames)
        member.dropped_frames += ahead
        self._deliveries.count_dropped(reason, ahead)

    def publish(self, blob: WeightsBlob, version: PolicyVersion, slots: Collection[Slot] | None = None) -> None:
        """Offer new weights to every worker, or to those of some places, one copy in memory for all; workers that come
        later get them, too.
        """
        published = self.shelf.put(blob, version, slots)
        self._events.note("published", version=version)
        for slot, member in self.members.items():
            if member.is_ready and (slots is None or slot in slots):
                self._offer(member, published, published.models)

    def _offer_everything(self, member: Member) -> int:
        """Offer every model's newest weights, oldest first. Returns the last request's number; 0: nothing to offer."""
        number = 0
        for published, models in self.shelf.of(member.place):
            number = self._offer(member, published, models)
        return number

    @property
    def version(self) -> PolicyVersion:
        """The highest version that was published."""
        return self.shelf.version

    def _offer(self, member: Member, published: "Published", models: tuple[str, ...]) -> int:
        number, blob = self._next_number(), published.blob
        member.offers[number] = published.version
        request = Request(
            number=number,
            action="offer",
            version=published.version,
            size_bytes=blob.size_bytes,
            default_model=blob.default_model,
            models=models,
        )
        member.request(request, published.payload)
        return number

    def may_collect(self) -> dict[Slot, int]:
        """Workers that may get tickets, and how many they hold."""
        return {
            slot: len(member.tickets)
            for slot, member in self.members.items()
            if member.is_synced and not member.is_leaving
        }

    def kill_starting(self) -> None:
        """End workers that have nothing to lose yet."""
        for member in self.members.values():
            if not member.is_ready:
                member.link.kill()

    def open_gates(self) -> None:
        """Let every worker go on."""
        for member in self.members.values():
            if member.is_ready:
                self._tell(member, "resume")

    def shut_gates(self) -> None:
        """Make every worker stop at its next vector step, without waiting for it."""
        for member in self.members.values():
            if member.is_ready:
                self._tell(member, "pause")

    def stop_stepping(self) -> None:
        """Make every worker give its batch up and finish."""
        for member in self.members.values():
            self._tell(member, "stop")

    def _tell(self, member: Member, action: str) -> None:
        self.requests.pop(self.request(member, action), None)

    def finish_idle(self) -> None:
        """Tell workers without a ticket to finish, when they leave or nothing is left to do."""
        over = self._schedule.is_done or self.is_closing or self.error is not None
        for member in self.members.values():
            if (member.is_leaving or over) and not member.tickets and not member.was_told_to_finish:
                member.was_told_to_finish = True
                member.send(Finish())

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- losing ------------------------------------------------------------------------------------------------

    def watch(self, now: float) -> None:
        """Kill workers that make no progress."""
        for slot, member in list(self.members.items()):
            if self._options.waits_for_places and not member.link.pid:
                member.last_progress = now
                continue
            is_building = not member.is_ready or member.link.phase is Phase.BUILDING
            limit = self._options.startup_timeout_s if is_building else self._hang_limit_s
            if (silent := member.silent_for_s(now, is_paused=self.is_paused)) > limit:
                log.warning("worker_hung", worker=member.name, seconds=round(silent, 1))
                doing = member.link.describe_doing()
                member.link.kill()
                reason = f"made no progress for {limit:.0f} s and was killed ({doing})"
                self._bury(slot, member, reason=reason, kind="hang")

    def _fail(self, slot: Slot, member: Member, failed: Failed) -> None:
        log.warning("worker_traceback", worker=member.name, exception=failed.traceback)
        is_final = failed.is_final and not (failed.may_pass and self._schedule.landed_frames)
        if is_final or self.ready is None:
            self.error = WorkerFailed(f"worker {member.name}: {failed.message}", kind=failed.kind)
            self.error.add_note(failed.traceback)
        self._bury(slot, member, reason=f"failed: {failed.message}", kind="error")

    def _bury(self, slot: Slot, member: Member, *, reason: str = "", kind: RestartReason = "crash") -> None:
        """A worker is gone: keep what it finished, take back what it did not, and have it replaced."""
        del self.members[slot]
        if not member.has_finished and not reason:
            member.link.wait(1.0)
            reason = member.link.describe_end()
            if self.ready is None:
                reason += f" {_describe_env(self.job)}: check its arguments"
        stepped = member.stepped_frames
        self.tally.bury(member)
        lost = self._take_back(slot, member)
        not_durable = member.landed_frames - member.durable_frames if self.store is not None else 0
        self._schedule.take_back(not_durable)
        unfinished = max(0, stepped - member.landed_frames - member.dropped_frames)
        self._deliveries.count_dropped("drain" if self.is_closing else "crash", unfinished + not_durable)
        member.link.close()
        if slot not in self.places:
            self.lineage.give_up(slot)
        is_filled_again = slot in self.places and not self.is_closing and not self._schedule.is_draining
        self._deliveries.complete(self._schedule.forget_member(slot, only_preempted=is_filled_again))
        if member.has_finished and not not_durable:
            return
        if not self.is_closing and self.error is None:
            log.warning("worker_lost", worker=member.name, reason=reason, frames_to_collect_again=lost + not_durable)
            self._events.note("worker_lost", worker=member.name, reason=reason, frames=lost + not_durable)
            self.tally.replaced(slot[0], kind)
            self._plan_replacement(slot, member, reason)

    def _take_back(self, slot: Slot, member: Member) -> int:
        if self._deliveries.slots is not None:
            self._deliveries.slots.forget(member.link.pid)
            for out in member.tickets.values():
                self._deliveries.slots.give_back(out.slot)
        return sum(self._schedule.lost(out.round.number, slot) for out in member.tickets.values())

    def _plan_replacement(self, slot: Slot, member: Member, reason: str) -> None:
        # A pod that ends while its worker starts says nothing of the manifest.
        if self.ready is None and not self._options.waits_for_places:
            self.error = WorkerFailed(f"worker {member.name} {reason}")
            return
        self.restarts[slot] = self.restarts.get(slot, 0) + 1
        lived_s = time.monotonic() - member.started
        was_healthy = member.landed_frames > 0 and lived_s >= self._options.healthy_s
        failures = self._failures[slot] = 1 if was_healthy else self._failures.get(slot, 0) + 1
        limit = self.job.spec.run_policy.max_restarts_per_slot
        if failures > limit:
            # A script has no manifest whose field it could change.
            field = "max_restarts" if self._options.parts else "spec.runPolicy.maxRestartsPerSlot"
            healthy_s = self._options.healthy_s
            between = f", and never lived {healthy_s:g} s in between" if math.isfinite(healthy_s) else ""
            self.error = WorkerFailed(
                f"worker {member.name} {reason}; it was restarted {limit} times already ({field}){between}"
            )
            return
        backoff = 0.0 if failures == 1 else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1))
        self._respawn_at[slot] = time.monotonic() + backoff


def _dataset_root(job: CollectorJob, options: FleetOptions) -> "DatasetRoot | None":
    if job.spec.output.dataset is None:
        return None
    # Imported by those who have a dataset: pyarrow takes a while to load.
    from cormorant_worker.engine.store import DatasetRoot

    return DatasetRoot(job.spec.output.dataset.uri, epoch=options.epoch)


def _device_of(job: CollectorJob, group: str) -> str:
    return "cuda" if any(g.name == group and g.device == "gpu" for g in job.spec.worker_groups) else "cpu"


def _describe_env(job: CollectorJob) -> str:
    env = job.spec.env
    if env.envpool is not None:
        return f"EnvPool's {env.envpool.task_id} with kwargs {dict(env.envpool.kwargs)}"
    assert env.gymnasium is not None
    return f"{env.gymnasium.id or env.gymnasium.entrypoint} with kwargs {dict(env.gymnasium.kwargs)}"
