"""The control loop: take a due job, decide, act, write its status once, and schedule the next reconcile.

Three queues hold job uids: jobs to reconcile, heads to poll, counters to write. None blocks another: a silent head
delays no other job, and a pod never waits for a counter.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from cormorant_operator import errors, names
from cormorant_operator.cache import Cache
from cormorant_operator.decide.plan import DrainHead, JobEvent, Plan, SetDesired
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.decide.status import event, refused_status
from cormorant_operator.executor import Executor
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Identity, Job, Unreadable
from cormorant_operator.job_state import HeadState, JobState
from cormorant_operator.kube.client import KubeClient, ListedKind, Purpose, purpose
from cormorant_operator.metrics import Handler, Metrics
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.work_queue import WorkQueue

log = structlog.get_logger()
RECONCILERS, POLLERS, WRITERS = 16, 32, 16
_TICK_S = 0.5
_QUICK_RESYNC_S, _FULL_RESYNC = 300.0, 12
"""Interval of listing the first page of each kind, which shows objects that watches missed; every twelfth time, all."""
_REMAKE_S = 30.0
"""Minimum interval between attempts to recreate a token Secret."""
_LISTED: tuple[ListedKind, ...] = ("CollectorJob", "Pod", "Service", "ConfigMap")


def now_utc() -> datetime:
    return datetime.now(UTC)


class Controller:
    """Reconciles every job of one installation. Belongs to one event loop."""

    def __init__(
        self,
        cluster: KubeClient,
        heads: HeadClient,
        *,
        key: bytes,
        defaults: OperatorDefaults,
        namespaces: tuple[str, ...] = (),
        selector: str = "",
    ) -> None:
        """Start empty; `run` lists the cluster. `key`, `namespaces` and `selector` are those of `Settings`."""
        self._api, self._heads, self._defaults = cluster, heads, defaults
        self._namespaces, self._selector = namespaces or ("",), selector
        self.cache = Cache()
        self.jobs_due, self.heads_due, self.counters_due = WorkQueue(), WorkQueue(), WorkQueue()
        self._states: dict[str, JobState] = {}
        self._num_polled = 0
        self._executor = Executor(cluster, heads, self.cache, key=key, clock=now_utc)
        self._is_resync_wanted = asyncio.Event()
        self._wanted: set[str] = set()
        """Namespaces to resync soon."""
        self.lost: dict[str, str] = {}
        """Namespaces that the operator may not list, and why. It does not touch their jobs."""
        self.metrics = Metrics()
        self.has_workloads = asyncio.Event()
        """A job has a Workload: watch them."""
        self.is_filled = False
        """The first full resync is done; before, nothing is decided."""

    @property
    def head_states(self) -> Counter[HeadState]:
        """Number of heads by the result of their last poll."""
        return Counter(head for state in self._states.values() if (head := state.head_state) is not None)

    async def run(self) -> None:
        await self.resync()
        self.is_filled = True
        async with asyncio.TaskGroup() as tasks:
            for _ in range(RECONCILERS):
                tasks.create_task(self._work_on(self.jobs_due, self._reconcile, "reconcile"))
            for _ in range(POLLERS):
                tasks.create_task(self._work_on(self.heads_due, self._poll, "poll"))
            for _ in range(WRITERS):
                tasks.create_task(self._work_on(self.counters_due, self._write_counters, "counters"))
            tasks.create_task(self._resync_forever())
            tasks.create_task(self._watch_the_clock())

    async def _watch_the_clock(self) -> None:
        """Restart every deadline if this process stood still: it received nothing meanwhile."""
        while True:
            before = now_utc()
            await asyncio.sleep(_TICK_S)
            if ((now := now_utc()) - before).total_seconds() > self._defaults.stood_still_s:
                log.warning("operator_stood_still", seconds=round((now - before).total_seconds()))
                for state in self._states.values():
                    state.led_since = now

    def notice(self, raw: dict[str, object], *, is_deleted: bool = False) -> None:
        if uid := self.cache.see(raw, is_deleted=is_deleted):
            self.jobs_due.add(uid)

    def want_resync(self, namespace: str = "") -> None:
        """Watches of this namespace (empty: of all) may have missed events: resync it soon."""
        self._wanted.add(namespace)
        self._is_resync_wanted.set()

    async def resync(self, namespaces: Collection[str] | None = None, *, is_quick: bool = False) -> None:
        """List everything in `namespaces` (None: in all), and forget deleted objects.

        `is_quick`: list the first page of each kind only, and stop where there is a second one. kopf's watches report
        every relisting except one that returns no objects. Such a list is short, so this finds deletions that were
        missed without reading ten thousand pods.

        Otherwise reconcile their jobs as well. If the API server refuses a namespace, its jobs are left alone until it
        can be listed again. Raises OperatorError if it does not answer, or refuses every namespace.
        """
        for namespace in self._namespaces if namespaces is None else sorted(namespaces):
            try:
                with purpose(Purpose.UPKEEP):
                    await self._list_all_of(namespace, is_quick=is_quick and namespace not in self.lost)
                if namespace in self.lost or not is_quick:
                    for uid in self.cache.jobs(namespace):
                        self.jobs_due.add(uid)
            except errors.KubeRefused as error:
                if not namespace:
                    raise
                if namespace not in self.lost:
                    log.warning("namespace_lost", namespace=namespace, reason=str(error))
                self.lost[namespace] = str(error)
            else:
                if self.lost.pop(namespace, None) is not None:
                    log.info("namespace_back", namespace=namespace)
        if len(self.lost) == len(self._namespaces):
            raise errors.OperatorError("; ".join(self.lost.values()))

    async def _list_all_of(self, namespace: str, *, is_quick: bool) -> None:
        for kind in _LISTED:
            await self._list(kind, namespace, is_quick=is_quick)
        jobs = (self.cache.job(uid) for uid in self.cache.jobs(namespace))
        if any(job is not None and job.queue for job in jobs):
            try:
                await self._list("Workload", namespace, is_quick=is_quick)
            except (errors.KubeNotFound, errors.KubeRefused) as error:
                # A cluster without Kueue is not an error here. A condition of each job reports it.
                log.warning("workloads_not_listed", namespace=namespace, reason=error.message)
        # Policies and budgets are not watched: changes are corrected at the next resync.
        if self._defaults.has_network_policies:
            await self._list("NetworkPolicy", namespace, is_quick=False)
        await self._list("PodDisruptionBudget", namespace, is_quick=False)
        has_pod_groups = True
        try:
            await self._list("PodGroup", namespace, is_quick=False)
        except (errors.KubeNotFound, errors.KubeRefused):
            has_pod_groups = False
        self._defaults = replace(self._defaults, has_pod_groups=has_pod_groups)

    async def _list(self, kind: ListedKind, namespace: str, *, is_quick: bool) -> None:
        selector = self._selector if kind == "CollectorJob" else names.WATCHED
        shown: list[str] = []
        shown_at, pages = "", 0
        async for page, version in self._api.list(kind, namespace=namespace, selector=selector):
            pages += 1
            if is_quick and pages > 1:
                return  # not empty, so watches have reported every deletion
            if version != shown_at:  # pages of one list have one version: this list begins, perhaps again
                shown, shown_at = [], version
            for raw in page:
                shown.append(raw["metadata"]["uid"])
                self.notice(raw)
        for uid in self.cache.prune(kind, shown, version=shown_at, namespace=namespace):
            self.jobs_due.add(uid)

    async def _resync_forever(self) -> None:
        loop, quick_resyncs = asyncio.get_running_loop(), 0
        quick_at = loop.time() + _QUICK_RESYNC_S
        while True:
            wait_s = self._defaults.resync_retry_s if self.lost or self._wanted else quick_at - loop.time()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_resync_wanted.wait(), max(0.0, wait_s))
            wanted, self._wanted = self._wanted | self.lost.keys(), set()
            self._is_resync_wanted.clear()
            if is_quick := loop.time() >= quick_at:
                quick_at = loop.time() + _QUICK_RESYNC_S
                quick_resyncs += 1
                if quick_resyncs % _FULL_RESYNC == 0:
                    wanted, is_quick = set(self._namespaces), False
            try:
                await self.resync(wanted)
                if is_quick:
                    await self.resync(is_quick=True)
            except errors.OperatorError as error:
                self._wanted |= wanted or set(self._namespaces)
                log.warning("resync_failed", reason=str(error))

    async def _work_on(self, queue: WorkQueue, work: Callable[[str], Awaitable[None]], handler: Handler) -> None:
        while True:
            uid = await queue.take()
            try:
                with self.metrics.measure(handler):
                    await work(uid)
            except errors.OperatorError as error:
                log.warning("reconcile_failed", uid=uid, reason=str(error), retry_s=round(queue.failed(uid), 1))
            except Exception:
                log.exception("reconcile_crashed", uid=uid, retry_s=round(queue.failed(uid), 1))
            else:
                queue.done(uid)

    # -- one job -----------------------------------------------------------------------------------------------

    async def _reconcile(self, uid: str) -> None:
        job = self.cache.job(uid)
        if job is None:
            if (state := self._states.pop(uid, None)) is not None:
                self._set_interval(state, None)
            self.heads_due.forget(uid)
            self.counters_due.forget(uid)
            return
        if isinstance(job, Unreadable):
            status = refused_status(job, now_utc().replace(microsecond=0))
            if status is not None:
                with purpose(Purpose.STATUS):
                    await self._executor.write_status(job, status)
                    await self._tell(job, (JobEvent(reason="InvalidSpec", message=job.message, is_warning=True),))
            elif job.status is None:
                # There is no condition for this: an unreadable status is not overwritten.
                await self._tell(job, (JobEvent(reason="StatusUnreadable", message=job.message, is_warning=True),))
        elif job.namespace not in self.lost:  # else it is queued when the namespace can be listed again
            log_fields = {"job": job.name, "namespace": job.namespace, "epoch": job.status.epoch or None}
            with structlog.contextvars.bound_contextvars(**log_fields, version=job.status.weights.version):
                await self._decide(job)

    async def _decide(self, job: Job) -> None:
        uid, now = job.uid, now_utc()
        if uid not in self._states:
            head = self.cache.record(uid).live_head
            # A head that is ready has mounted the Secret.
            self._states[uid] = JobState(led_since=now, has_tokens=head is not None and head.is_ready)
        state = self._states[uid]
        record = self.cache.record(uid)
        # Only jobs with polled heads have changing counters.
        plan = reconcile(job, record, state, now, defaults=self._defaults.for_jobs(self._num_polled))
        if not self.has_workloads.is_set() and record.workload is not None:
            self.has_workloads.set()
        state.counters = None
        # A failing action stops neither the others nor the status.
        failed: errors.KubeError | None = None
        for action in plan.actions:
            try:
                await self._executor.do(job, action, state, decided_at=now)
            except errors.KubeError as error:
                log.warning("action_failed", action=type(action).__name__, reason=str(error))
                failed = failed or error
        if plan.status is not None and plan.is_counters_only:
            state.counters = (job, plan.status)
            self.counters_due.add(uid)
        elif plan.status is not None:
            with purpose(Purpose.STATUS):
                await self._executor.write_status(job, plan.status)
                await self._tell(job, plan.events)
        self._schedule(job, plan, state)
        if failed is not None:
            raise failed

    async def _write_counters(self, uid: str) -> None:
        state = self._states.get(uid)
        if state is None or state.counters is None:
            return
        # Skipped if the job changed since: counters must not undo a newer condition.
        with purpose(Purpose.COUNTERS), suppress(errors.KubeConflict):
            await self._executor.write_status(*state.counters)

    def _schedule(self, job: Job, plan: Plan, state: JobState) -> None:
        words = tuple(action for action in plan.actions if isinstance(action, (SetDesired, DrainHead)))
        if len(plan.actions) > len(words):
            # The actions may require further actions.
            self.jobs_due.add(job.uid, after_s=0.1)
        if plan.due is not None:
            self.jobs_due.add(job.uid, after_s=(plan.due - now_utc()).total_seconds())
        self._set_interval(state, plan.poll_s)
        if plan.poll_s is None:
            return
        if plan.counters_at is not None:
            # Its earlier counters must be written, whatever the head answers next.
            state.is_answer_due = True
            self.heads_due.add(job.uid, after_s=(plan.counters_at - now_utc()).total_seconds())
        if words:
            # Do not repeat commands at once to a head that does not apply them.
            after_s = self._defaults.fast_poll_s if words == state.told else 0.0
            state.told, state.is_answer_due = words, True
            self.heads_due.add(job.uid, after_s=after_s)
            return
        head = self.cache.record(job.uid).live_head
        age_s = asyncio.get_running_loop().time() - state.polled_at if state.polled_at is not None else plan.poll_s
        is_new = head is not None and head.uid != state.polled_pod
        self.heads_due.add(job.uid, after_s=0.0 if is_new else plan.poll_s - age_s)

    async def _tell(self, job: Identity, notes: tuple[JobEvent, ...]) -> None:
        for note in notes:
            with suppress(errors.KubeError):
                await self._api.create(event(job, note, at=now_utc()))

    # -- one head ----------------------------------------------------------------------------------------------

    async def _poll(self, uid: str) -> None:
        job, head = self.cache.job(uid), self.cache.record(uid).live_head
        state = self._states.get(uid)
        if not isinstance(job, Job) or state is None or head is None or not head.is_asked:
            return
        before, now = state.head_report, asyncio.get_running_loop().time
        try:
            # After a longer gap between two answers, the operator does not know what the head did before.
            max_gap_s = max(60.0, 4 * self._defaults.poll_s)
            state.record_answer(await self._heads.ask(job, head), at=now_utc(), max_gap_s=max_gap_s)
        except errors.HeadSilent as error:
            if not state.is_silent:
                log.warning("head_silent", job=job.name, namespace=job.namespace, reason=str(error))
                state.silence = str(error)
            state.is_silent, state.is_token_refused = True, isinstance(error, errors.TokenRefused)
            state.refused_since = (state.refused_since or now_utc()) if state.is_token_refused else None
            if state.is_token_refused and now() - state.remade_at >= _REMAKE_S:
                # The changed Secret may be deleted by now: recreate it, and the head picks it up.
                state.remade_at, state.has_tokens, state.is_answer_due = now(), False, True
        state.polled_at, state.polled_pod = now(), head.uid
        if state.is_answer_due or state.head_report != before:
            state.is_answer_due = False
            self.jobs_due.add(uid)
        elif state.poll_s is not None:
            # Nothing changed: the last decision holds until its due time.
            self.heads_due.add(uid, after_s=state.poll_s)

    def _set_interval(self, state: JobState, poll_s: float | None) -> None:
        self._num_polled += (poll_s is not None) - (state.poll_s is not None)
        state.poll_s = poll_s
        if poll_s is None:
            state.polled_at = None
