"""Watches with kopf, which logs in, streams events, and relists after a broken stream. kopf decides nothing.

Why no other part of kopf is used: docs/decisions/0012-kopf-only-watches.md. kopf runs in a thread with its own event
loop, because it cancels unknown tasks when it stops.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import kopf
import structlog

from cormorant_contract.children import PREFIX
from cormorant_contract.job import GROUP, VERSION
from cormorant_contract.schema import PLURAL
from cormorant_operator import names
from cormorant_operator.kube.client import PAGE, find_connection

log = structlog.get_logger()
Kinds = Mapping[tuple[str, str, str], str]
"""Watched kinds, by group, version and plural."""
KINDS: Kinds = {
    (GROUP, VERSION, PLURAL): "CollectorJob",
    ("", "v1", "pods"): "Pod",
    ("", "v1", "services"): "Service",
    ("", "v1", "configmaps"): "ConfigMap",
}
QUEUE_KINDS: Kinds = {("kueue.x-k8s.io", "v1beta2", "workloads"): "Workload"}
_STOP_S = 10.0
_PAUSE_S = 3.0
_LOOK_S = 0.5
_FIRST_STREAM_S = 60.0
_LISTED_S = 1.5
"""A relisting by kopf is complete when it shows nothing more for this long."""
_STREAM = "watcher for "
"""Prefix of kopf's task names for streams."""
_END_S = 5.0
"""Time for kopf to stop. A request that needs a new login meanwhile would wait forever."""
Notice = Callable[..., None]


def settings(kinds: Kinds, selector: str = "") -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing: no events, annotations, finalizers or peers."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.persistence.finalizer = f"{PREFIX}/unused"
    chosen.watching.chunk_size = PAGE
    # How long kopf keeps an object's last event. The default of 5 s would hold a whole list in memory; with 0 it may
    # miss events.
    chosen.queueing.idle_timeout = 0.1
    chosen.watching.connect_timeout = 10
    # Kinds and namespaces are fixed: kopf looks them up only at its start, and needs no permission to watch them.
    chosen.scanning.disabled = True
    chosen.networking.request_timeout = 60
    # Filter on the server: otherwise every pod of the cluster would be streamed.
    for (group, version, plural), kind in kinds.items():
        wanted = selector if kind == "CollectorJob" else names.WATCHED
        if wanted:
            chosen.watching.label_selectors[*((group,) if group else ()), version, plural] = wanted
    return chosen


def registry(kinds: Kinds, notice: Notice, on_listed: Callable[[], None]) -> kopf.OperatorRegistry:
    """Handlers that forward every event in kopf's thread. `on_listed`: called for each object from a relisting."""
    handlers = kopf.OperatorRegistry()

    def login(**_: Any) -> kopf.ConnectionInfo:
        return find_connection()

    def watch(group: str, version: str, plural: str, kind: str) -> None:
        async def handle(event: Any, **_: Any) -> None:
            if event["type"] is None:
                on_listed()
            # Items of a list lack their kind.
            notice({**event["object"], "kind": kind}, is_deleted=event["type"] == "DELETED")

        kopf.on.event(group, version, plural, id=f"watch-{plural}", registry=handlers)(handle)

    kopf.on.login(id="login", registry=handlers)(login)
    for resource, kind in kinds.items():
        watch(*resource, kind)
    return handlers


class Watch:
    """kopf in a thread, from `start` to `stop`."""

    def __init__(
        self,
        notice: Notice,
        *,
        kinds: Kinds = KINDS,
        namespace: str = "",
        selector: str = "",
        on_gap: Callable[[], None],
    ) -> None:
        """Both callbacks run in the watch's thread. Each namespace (empty: all) has its own, because a refused one ends
        it. `on_gap` is called when events may have been missed: kopf was restarted, or relisted because a stream's
        version was too old (HTTP 410 within the stream). A relisting without any object is not reported.
        """
        self._notice, self._namespace, self._on_gap = notice, namespace, on_gap
        self._kinds, self._selector = kinds, selector
        self._gap: asyncio.TimerHandle | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        """Stop within ten seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_S)

    def _run(self) -> None:
        # kopf would warn about signals and log each resource that it finds.
        logging.getLogger("kopf").setLevel(logging.ERROR)
        while not self._stop.is_set():
            reason = "a stream ended"
            try:
                run_bounded(self._watch())
            except Exception as error:  # noqa: BLE001 - kopf raises whatever broke one of its streams
                reason = repr(error)
            if not self._stop.wait(_PAUSE_S):
                log.warning("watches_broke_off", namespace=self._namespace, reason=reason)
                self._on_gap()

    async def _watch(self) -> None:
        stop = asyncio.Event()
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry(self._kinds, self._notice, self._listed),
                settings=settings(self._kinds, self._selector),
                standalone=True,
                clusterwide=not self._namespace,
                namespaces=[self._namespace] if self._namespace else [],
                stop_flag=stop,
            )
        )
        guard = asyncio.create_task(self._guard(stop))
        await asyncio.wait((watching, guard), return_when=asyncio.FIRST_COMPLETED)
        ended, _ = await asyncio.wait((watching,), timeout=_END_S)
        if not ended:
            raise TimeoutError(f"a stream ended, and the others did not end within {_END_S:.0f} s")
        watching.result()

    def _listed(self) -> None:
        """Kopf is relisting: deletions may have been missed, so report a gap when it is done."""
        if self._gap is not None:
            self._gap.cancel()
        self._gap = asyncio.get_running_loop().call_later(_LISTED_S, self._on_gap)

    async def _guard(self, stop: asyncio.Event) -> None:
        """Stop kopf when one of its streams has ended: kopf would only log that, and continue without the stream."""
        streams: set[asyncio.Task[Any]] = set()
        looks_left = round(_FIRST_STREAM_S / _LOOK_S)
        while not self._stop.is_set() and not any(task.done() for task in streams) and (streams or looks_left):
            streams |= {task for task in asyncio.all_tasks() if task.get_name().startswith(_STREAM)}
            looks_left -= not streams
            await asyncio.sleep(_LOOK_S)
        stop.set()


def run_bounded(main: Coroutine[Any, Any, None], *, end_s: float = _END_S) -> None:
    """Like `asyncio.run`, but tasks that ignore cancellation are abandoned after `end_s`."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=end_s))
        with contextlib.suppress(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), end_s))
        loop.close()
