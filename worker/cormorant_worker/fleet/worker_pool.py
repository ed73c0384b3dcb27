"""The workers of a local fleet: started, listened to, watched, buried and replaced. Not thread-safe.

The fleet's thread calls it with the fleet's condition held; it never waits. What may take long is the porter's:
starting a worker, seeing one off, laying out memory and dataset. A turn costs what has happened since the last one,
whatever the number of workers.

    vacant -> (porter) starting -> member -> gone (porter) -> buried, and its place vacant
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import CormorantError, WorkerFailed
from cormorant_worker.fleet.background import BackgroundTasks, SeenOff, see_off
from cormorant_worker.fleet.batch_queue import BatchQueue, RoundShare
from cormorant_worker.fleet.counters import FleetCounters, RestartReason
from cormorant_worker.fleet.desired_slots import DesiredSlots
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.hang_detector import HangDetector
from cormorant_worker.fleet.job_facts import dataset_of, describe_env, device_of
from cormorant_worker.fleet.lineage import Lineage
from cormorant_worker.fleet.losses import settle
from cormorant_worker.fleet.offers import Offers
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.published_weights import PublishedWeights
from cormorant_worker.fleet.replacements import Replacements
from cormorant_worker.fleet.requests import Requests
from cormorant_worker.fleet.scheduler import Grant, Round, Scheduler, Slot
from cormorant_worker.fleet.transport import BlockPool, Engine, Payload, Source, WorkerConnection
from cormorant_worker.fleet.worker_handle import TicketOut, WorkerHandle, new_handle
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import (
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
    Sealed,
    Start,
    Ticket,
)

if TYPE_CHECKING:
    from cormorant_worker.fleet.dataset_root import DatasetRoot

log = structlog.get_logger()

_MOST_GRANTS = 24
_MOST_FINISHES = 24
_MOST_STARTS = 24
"""In one turn; the others in the next, which follows at once: callers get the condition in between."""


class WorkerPool(Requests):
    """Every worker of one fleet, by place."""

    def __init__(
        self,
        job: CollectorJob,
        options: FleetOptions,
        engine: Engine,
        schedule: Scheduler,
        deliveries: BatchQueue,
        events: Events,
        porter: BackgroundTasks,
    ) -> None:
        super().__init__(engine)
        self.job = job
        self.places = DesiredSlots(job)
        """DesiredSlots that are to be filled."""
        self.vacant: set[Slot] = set()
        """Those of them that nobody is in, or on the way to."""
        self.starting: set[Slot] = set()
        """DesiredSlots whose workers the porter is starting."""
        self.gone: dict[Slot, WorkerHandle] = {}
        """Workers that the porter sees off."""
        self.unsynced: set[Slot] = set()
        """DesiredSlots without a worker that may hold tickets."""
        self.leaving: set[Slot] = set()
        """Members that get no more tickets."""
        self.num_tickets = 0
        self.joined: deque[WorkerHandle] = deque()
        """Members whose sources nobody waits for yet."""
        self.stuck: deque[WorkerHandle] = deque()
        """Members that do not read as fast as they are told."""
        self.parted: deque[tuple[WorkerConnection, Callable[[], None]]] = deque()
        """Links whose sources need not be waited for any more, and what is to be called then."""
        self.ready: Ready | None = None
        """What the first worker said of itself; all others must agree."""
        self.error: CormorantError | None = None
        """Why the fleet cannot go on."""
        self.is_closing = False
        self.is_paused = options.starts_paused
        self.shelf = PublishedWeights()
        """What was published."""
        self.offers = Offers(self.shelf, self.members, events, next_number=self._next_number)
        self.seed = job.spec.collection.seed
        """What workers that start from now on derive their streams from."""
        self.final_states: dict[Slot, bytes] = {}
        """Collectors' states of workers that finished; empty for those that could not be saved."""
        self.replacements = Replacements(job, options)
        self.tally = FleetCounters()
        self.watch = HangDetector(job, options, self.members, self.tally, on_hung=self._end_hung)
        self._options = options
        self._schedule = schedule
        self._deliveries = deliveries
        self._events = events
        self.store: DatasetRoot | None = dataset_of(job, epoch=options.epoch)
        self.found_frames = options.floor_frames if self.store is None else self.store.frames
        """Frames that counted before this fleet collected any: those of the dataset, or the options' floor."""
        self.lineage = Lineage(
            epoch=options.epoch if self.store is None else self.store.epoch,
            written={} if self.store is None else self.store.written,
            warmup_frames=max(0, job.spec.collection.init_random_frames - self.found_frames),
        )
        self._porter = porter
        self._untold: dict[Slot, None] = {}
        """Members that were not told to finish."""
        self._unmet: list[tuple[WorkerHandle, Ready]] = []
        """Members that are ready before memory and dataset are laid out."""
        self._is_learning = False
        self._num_threads = 0

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _give_up(self, error: Exception, what: str) -> None:
        if self.error is None:
            if not isinstance(error, CormorantError):
                error = WorkerFailed(f"cannot {what}: {type(error).__name__}: {error}")
            self.error = error

    # -- places ------------------------------------------------------------------------------------------------

    def resize(self, workers: int | Mapping[str, int | Collection[int]]) -> None:
        """Say how many places there are, in all or by group: see `DesiredSlots.resize`.

        Raises:
            FleetError: no such group, a negative size, or nobody would be left.
        """
        given_up = self.places.resize(workers, check=self.engine.make_room_for)
        self._leave(given_up)
        self.vacant = {
            slot for slot in self.places if not any(slot in known for known in (self.members, self.starting, self.gone))
        }
        self.unsynced = {slot for slot in self.places if not self.is_serving(slot)}

    def retire(self, name: str) -> None:
        """Give a worker's place up until its group's size is raised. It finishes what it holds.

        Raises:
            FleetError: no such worker, or nobody would be left.
        """
        self._leave(self.places.give_up(name))

    def _leave(self, given_up: Collection[Slot]) -> None:
        for slot in given_up:
            if (member := self.members.get(slot)) is not None:
                self._let_go(member)
            self.vacant.discard(slot)
            self.unsynced.discard(slot)
            self.replacements.forget(slot)
            self._deliveries.complete(self._schedule.forget_member(slot))
        if self._deliveries.blocks is not None:
            self._size_store(self._deliveries.blocks)

    def _let_go(self, member: WorkerHandle) -> None:
        """A worker gets no more tickets, and ends when it holds none."""
        member.is_leaving = True
        self.leaving.add(member.place)
        self._schedule.may_not_collect(member.place)

    def _blocks_needed(self) -> tuple[int, int]:
        """Two a worker, and the queue; and with how many a round can begin at least."""
        num_workers, queue = len(self.places), self.job.spec.output.queue
        per_round = num_workers if self._schedule.mode == "sync" else 1
        return 2 * num_workers + (queue.capacity_batches * per_round if queue else 0), per_round

    def _size_store(self, store: BlockPool) -> None:
        limit, fewest = self._blocks_needed()
        store.resize(limit, at_least=fewest)

    def is_serving(self, slot: Slot) -> bool:
        """True when a place's worker may hold tickets."""
        member = self.members.get(slot)
        return member is not None and member.is_synced

    @property
    def is_complete(self) -> bool:
        """True when every place has a worker that may hold tickets, and nobody else is left."""
        return not (self.unsynced or self.starting or self.gone) and len(self.members) == len(self.places)

    @property
    def has_begun(self) -> bool:
        """True when some place has a worker that may hold tickets, and whoever leaves has left."""
        return not self.leaving and len(self.unsynced) < len(self.places)

    @property
    def is_empty(self) -> bool:
        """True when nobody is here, on the way here, or on the way out."""
        return not (self.members or self.starting or self.gone)

    @property
    def is_idle(self) -> bool:
        """True when no worker holds a ticket."""
        return self.num_tickets == 0 and not self.gone

    # -- starting ----------------------------------------------------------------------------------------------

    def start_missing(self, now: float) -> None:
        if not self.vacant or self.error is not None or self.is_closing or self._schedule.is_done:
            return
        for slot in self.replacements.due(self.vacant, now)[:_MOST_STARTS]:
            self.vacant.discard(slot)
            self.replacements.forget(slot)
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
            warmup_frames=self.lineage.warmup_of(slot, self.places),
            max_threads=self.engine.cpus_for(len(self.places)),
            num_threads=self._num_threads,
            device=self._options.device or device_of(self.job, group),
            seed=self.seed,
        )
        place = self.lineage.begin(place, first_free=first_free, batch_ids=self._batch_ids)
        overrides = self._options.overrides_of(index)
        start = Start(job=self.job, place=place, frames_per_batch=self._schedule.frames_per_batch, overrides=overrides)
        self.starting.add(slot)
        self._porter.carry(lambda: self.engine.start(start), lambda link: self._admit(slot, link))

    @property
    def _batch_ids(self) -> int:
        """Trajectory ids that one batch can use: one a frame, and new ones for all environments twice."""
        return self._schedule.frames_per_batch + 2 * (self.ready.layout.num_envs if self.ready is not None else 0)

    def _admit(self, slot: Slot, link: "WorkerConnection | Exception") -> None:
        self.starting.discard(slot)
        if isinstance(link, Exception):
            self._give_up(link, "start a worker")
            return
        member = self.members[slot] = new_handle(link, now=self.watch.lived_s, stuck=self.stuck)
        self._untold[slot] = None
        self.watch.add(slot)
        self.joined.append(member)
        self.tally.joined(slot[0])
        if slot not in self.places:
            self._let_go(member)
        if self.is_closing:
            self._lose(slot, member, is_killed=True)  # it has nothing to lose yet

    def _meet(self, member: WorkerHandle, ready: Ready) -> None:
        """A worker has started. The first one tells what memory and dataset have to be laid out for."""
        if self.ready is not None:
            self._welcome(member, ready)
            return
        self._unmet.append((member, ready))
        if not self._is_learning:
            self._is_learning = True
            if self._options.whole_rows:
                self._schedule.round_up(ready.layout.num_envs, num_workers=len(self.places))
            limit, fewest = self._blocks_needed()
            self._porter.carry(lambda: self._lay_out(ready, limit, fewest), lambda found: self._learn(ready, found))

    def _lay_out(self, ready: Ready, limit: int, fewest: int) -> BlockPool:
        """Without the condition: an object store is asked what it has, a dataset may be far away."""
        store = self.engine.make_store(ready.layout, limit)
        store.resize(limit, at_least=fewest)
        if self.store is not None:
            self.store.open(self.job, ready)
        return store

    def _learn(self, ready: Ready, found: "BlockPool | Exception") -> None:
        if isinstance(found, Exception):
            self._give_up(found, "lay out memory for batches")
            return
        self.ready = ready
        self._num_threads = ready.num_threads
        self._deliveries.blocks = found
        self._size_store(found)
        self._schedule.accepted_frames = self.found_frames
        unmet, self._unmet = self._unmet, []
        for member, theirs in unmet:
            if not member.is_gone:
                self._welcome(member, theirs)

    def _welcome(self, member: WorkerHandle, ready: Ready) -> None:
        assert self.ready is not None
        if ready.layout != self.ready.layout:
            self.error = WorkerFailed(
                f"worker {member.name} makes batches of another layout than the first one: {ready.layout} instead of "
                f"{self.ready.layout}; environments and policies must not differ between workers"
            )
            return
        member.is_ready = True
        member.kept_version = PolicyVersion(ready.kept_version)
        # From here on it is held to the hang limit, which its start may have exceeded.
        member.last_progress = self.watch.lived_s
        if self._schedule.is_done:
            return  # the dataset had all frames already: `finish_idle` sends it home
        uri = self.store.uri if self.store is not None else ""
        member.send(Begin(dataset_uri=uri, seal_after_s=self._options.seal_after_s))
        self.offers.note_joined(member)
        # The reply comes when the worker has opened its dataset and has the weights.
        if not self.offers.offer_next(member):
            member.sync_request = self.request(member, "resume")
        if self.is_paused:
            self._tell(member, "pause")
        log.info("worker_ready", worker=member.name, seconds=round(time.monotonic() - member.started, 2))

    # -- listening ---------------------------------------------------------------------------------------------

    def listen(self, member: WorkerHandle, source: Source | None) -> None:
        """Read what has come from a worker, and see it off if it is gone."""
        if member.is_gone:
            return
        slot = member.place
        for message in member.link.receive(source):
            self._handle(slot, member, message)
            if member.is_gone:
                return
        if not member.link.is_open:
            self._lose(slot, member)

    def _handle(self, slot: Slot, member: WorkerHandle, message: object) -> None:
        match message:
            case Sealed():
                self._seal(slot, member, message)
            case Ready():
                self._meet(member, message)
            case Reply():
                self._note_reply(member, message)
            case Applied():
                before = member.version
                self.offers.note_applied(member, PolicyVersion(message.version))
                if member.is_synced:
                    self.tally.applied(slot[0], before, member.version)
            case Logged():
                getattr(log, message.level, log.info)(message.event, **{**message.fields, "worker": member.name})
            case Leaving():
                log.info("worker_leaving", worker=member.name)
                self._let_go(member)
            case Finished():
                member.has_finished = True
                self.final_states[slot] = message.state
            case Failed():
                self._fail(slot, member, message)

    def _seal(self, slot: Slot, member: WorkerHandle, sealed: Sealed) -> None:
        out = self._end_ticket(member, sealed.number)
        member.landed_frames += sealed.num_frames
        member.durable_frames = sealed.durable_frames
        self.lineage.landed(slot, sealed)
        self.tally.seal(sealed, member)
        member.env_restarts = sealed.env_restarts
        self._events.note(
            "sealed", worker=member.name, frames=sealed.num_frames, version=sealed.min_version, sealed=sealed
        )
        for late in self._deliveries.land(out.round, slot, RoundShare(sealed, out.block_index, member.attempt)):
            if (other := self.members.get(late)) is not None:
                self._seal_early(other, out.round)

    def _end_ticket(self, member: WorkerHandle, number: int) -> TicketOut:
        self.num_tickets -= 1
        out = member.tickets.pop(number)
        if member.is_synced and not member.is_leaving and not member.is_gone:
            self._schedule.may_collect(member.place, holds=len(member.tickets))
        return out

    def note_lent(self, frames: int, min_version: int) -> None:
        """A consumer takes a round in which a version is the oldest that acted."""
        staleness = self.shelf.common_version - min_version if min_version >= 0 else 0
        self._events.note("lent", frames=frames, version=min_version, staleness=max(0, staleness))

    def _seal_early(self, member: WorkerHandle, found: Round) -> None:
        for number, out in member.tickets.items():
            if out.round is found:
                member.request(Request(number=self._next_number(), action="seal", ticket=number))

    def _note_reply(self, member: WorkerHandle, reply: Reply) -> None:
        member.unanswered.pop(reply.number, None)
        if reply.number in self.requests:
            self.requests[reply.number] = reply
        elif reply.error:
            log.warning("request_refused", worker=member.name, reason=reply.error)
        if reply.number == member.offer:
            has_all = self.offers.note_reply(member, reply)
            if has_all and not member.is_synced:
                self._sync(member, reply)
        elif reply.number == member.sync_request:
            self.requests.pop(reply.number, None)
            # What was published while it opened its dataset comes first.
            if not self.offers.offer_next(member):
                self._sync(member, reply)

    def _sync(self, member: WorkerHandle, reply: Reply) -> None:
        member.is_synced = True
        self.unsynced.discard(member.place)
        self.tally.synced(member.place[0], member.version)
        if not member.is_leaving:
            self._schedule.may_collect(member.place, holds=len(member.tickets))
        self._events.note("worker_ready", worker=member.name, version=member.version)
        if reply.error:
            self.error = WorkerFailed(f"worker {member.name} refused the current weights: {reply.error}")

    # -- talking -----------------------------------------------------------------------------------------------

    def hand_out(self, grant: Grant) -> None:
        self._deliveries.free_a_block()
        assert self._deliveries.blocks is not None
        member = self.members[grant.slot]
        block_index, memory = self._deliveries.blocks.lend(member.link.pid)
        number = self._next_number()
        member.tickets[number] = TicketOut(grant.round, block_index, grant.num_frames)
        self.num_tickets += 1
        ticket = Ticket(
            number=number,
            block_index=block_index,
            block_is_new=memory is not None,
            num_frames=grant.num_frames,
            version=self.shelf.version_of(grant.slot),
        )
        member.send_ticket(ticket, memory)

    def reseed(self, seed: int, warmup: Mapping[Slot, int]) -> dict[int, WorkerHandle]:
        """Have every worker, and those that come later, begin anew from a seed, and slots with so many random frames.
        None may hold a ticket. Returns who was asked, by the number of the reply.
        """
        self.seed = seed
        self._events.note("seeded", reason=f"seed {seed}")
        members = [member for member in self.members.values() if member.is_ready]
        streams = [replace(m.stream, seed=seed, warmup_frames=warmup.get(m.place, -1)) for m in members]
        return {self.begin_anew(m, stream): m for m, stream in zip(members, streams, strict=True)}

    def publish(
        self, blob: WeightsBlob, version: PolicyVersion, payload: Payload, slots: Collection[Slot] | None = None
    ) -> None:
        """Offer new weights to every worker, or to those of some places, one copy in memory for all; workers that come
        later get them, too: `payload` is the same bytes as the engine shares them.
        """
        self.shelf.put(blob, version, slots, payload)
        self._events.note("published", version=version)
        self.offers.note_published(slots)

    @property
    def version(self) -> PolicyVersion:
        return self.shelf.version

    def grant_some(self) -> bool:
        """Hand out tickets. Returns whether there may be more."""
        grants = self._schedule.grants(
            num_workers=len(self.places),
            ahead_of_consumer=self._deliveries.ahead_of_consumer,
            room=self._deliveries.room,
            most=_MOST_GRANTS,
        )
        for grant in grants:
            self.hand_out(grant)
        return len(grants) >= _MOST_GRANTS

    def kill_starting(self) -> None:
        """End workers that have nothing to lose yet."""
        for slot, member in list(self.members.items()):
            if not member.is_ready:
                self._lose(slot, member, is_killed=True)

    def finish_idle(self) -> bool:
        """Tell workers without a ticket to finish, when they leave or nothing is left to do. Returns whether there may
        be more of them.
        """
        over = self._schedule.is_done or self.is_closing or self.error is not None
        asked = self._untold if over else [slot for slot in self.leaving if slot in self._untold]
        idle = (slot for slot in asked if not self.members[slot].tickets)
        told = tuple(islice(idle, _MOST_FINISHES))
        for slot in told:
            del self._untold[slot]
            member = self.members[slot]
            member.was_told_to_finish = True
            member.send(Finish(saves=self._schedule.is_done and not self.is_closing))
        return len(told) == _MOST_FINISHES

    # -- losing ------------------------------------------------------------------------------------------------

    def _end_hung(self, member: WorkerHandle, silent_s: float, limit_s: float) -> None:
        log.warning("worker_hung", worker=member.name, seconds=round(silent_s, 1))
        reason = f"made no progress for {limit_s:.0f} s and was killed ({member.link.describe_doing()})"
        self._lose(member.place, member, reason=reason, kind="hang", is_killed=True)

    def _fail(self, slot: Slot, member: WorkerHandle, failed: Failed) -> None:
        log.warning("worker_traceback", worker=member.name, exception=failed.traceback)
        is_final = failed.is_final and not (failed.may_pass and self._schedule.landed_frames)
        if is_final or self.ready is None:
            self.error = WorkerFailed(f"worker {member.name}: {failed.message}", kind=failed.kind)
            self.error.add_note(failed.traceback)
        self._lose(slot, member, reason=f"failed: {failed.message}", kind="error")

    def _lose(
        self,
        slot: Slot,
        member: WorkerHandle,
        *,
        reason: str = "",
        kind: RestartReason = "crash",
        is_killed: bool = False,
    ) -> None:
        """A worker is gone, or is to be: it is no member any more, and the porter sees it off."""
        del self.members[slot]
        member.is_gone = True
        self.gone[slot] = member
        self._untold.pop(slot, None)
        self.watch.remove(slot)
        self.leaving.discard(slot)
        if slot in self.places:
            self.unsynced.add(slot)
        self._schedule.may_not_collect(slot)
        self.offers.note_gone(slot)
        self.tally.parted(slot[0], member.version, is_synced=member.is_synced)
        is_told = bool(reason) or member.has_finished
        ask = partial(self.store.durable_frames, member.link.place.attempt_name) if self.store is not None else None

        def be_seen_off() -> None:
            self._porter.carry(
                lambda: see_off(member.link, is_killed=is_killed, is_told=is_told, durable_frames=ask),
                lambda seen: self._bury(slot, member, seen, reason=reason, kind=kind),
            )

        self.parted.append((member.link, be_seen_off))

    def _bury(
        self, slot: Slot, member: WorkerHandle, seen: "SeenOff | Exception", *, reason: str, kind: RestartReason
    ) -> None:
        """A worker has ended: keep what it finished, take back what it did not, and have it replaced."""
        del self.gone[slot]
        if isinstance(seen, Exception):
            self._give_up(seen, "see a worker off")
            seen = SeenOff(how=str(seen), durable_frames=member.durable_frames if self.store is not None else None)
        reason = reason or seen.how
        if slot in self.places:
            self.vacant.add(slot)
        if self.ready is None and not member.has_finished and kind == "crash":
            reason += f" {describe_env(self.job)}: check its arguments"
        self.tally.follow(member)
        again = settle(
            member,
            [self._end_ticket(member, number) for number in tuple(member.tickets)],
            self._schedule,
            self._deliveries,
            self.lineage,
            durable_frames=seen.durable_frames,
            reason="drain" if self.is_closing else "crash",
        )
        if slot not in self.places:
            self.lineage.give_up(slot)
        is_filled_again = slot in self.places and not self.is_closing and not self._schedule.is_draining
        self._deliveries.complete(self._schedule.forget_member(slot, only_preempted=is_filled_again))
        if member.has_finished and not again:
            return
        if not self.is_closing and self.error is None:
            log.warning("worker_lost", worker=member.name, reason=reason, frames_to_collect_again=again)
            self._events.note("worker_lost", worker=member.name, reason=reason, frames=again)
            self.tally.replaced(slot[0], kind)
            self._replace(member, reason)

    def _replace(self, member: WorkerHandle, reason: str) -> None:
        # A pod that ends while its worker starts says nothing of the manifest.
        if self.ready is None and not self._options.waits_for_places:
            self.error = WorkerFailed(f"worker {member.name} {reason}")
            return
        try:
            self.replacements.plan(member, reason, now=time.monotonic())
        except WorkerFailed as error:
            self.error = error
