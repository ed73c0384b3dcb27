"""`cormorant logs JOB`: what its pods print, a prefix a pod where there are several.

With -f new pods are followed too: the next head after a restart, a worker's successor.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from cormorant_cli.cluster import Cluster, LogOptions, Raw, connected, near_names
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import BadInput, ClusterAway, CommandFailed, NoHead, ObjectMissing
from cormorant_cli.jobs import JobPod, condition, holds, identity, pods_of, why, why_waiting
from cormorant_contract.children import HEAD

_LOOK_S = 1.0
_TAIL_OF_MANY = 20
_AWAY_S = 60.0
"""For the API server to come back while logs are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    slot: str = ""
    """One worker's; empty: the head's, or everybody's."""
    is_all: bool = False
    is_previous: bool = False
    """The pod before the one that is there now."""

    def choose(self, pods: Iterable[JobPod]) -> list[JobPod]:
        """The pods that it means, each place once: the newest, or the one before."""
        places: dict[str, list[JobPod]] = {}
        for pod in pods:
            if self.is_all or (pod.slot == self.slot if self.slot else pod.role == HEAD):
                places.setdefault(pod.slot or HEAD, []).append(pod)
        chosen = []
        for place in places.values():
            live = next((index for index, pod in enumerate(place) if pod.is_live), 0)
            wanted = live + 1 if self.is_previous else live
            chosen += place[wanted : wanted + 1]
        return chosen


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    head: Annotated[bool, typer.Option("--head", help="Show the head's log (the default).")] = False,
    worker: Annotated[
        str, typer.Option("--worker", metavar="G-I", help="Show the log of one worker, such as cpu-0.")
    ] = "",
    all_pods: Annotated[bool, typer.Option("--all", help="Show the logs of the head and all workers.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the job ends.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the previous pod's log, if that pod still exists.")
    ] = False,
    tail: Annotated[int, typer.Option(min=-1, help="Number of last lines per pod (-1: all; 20 with --all -f).")] = -1,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Print a timestamp before each line.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Show the logs of a job's pods. With several pods, each line begins with the pod's slot."""
    if sum((head, bool(worker), all_pods)) > 1:
        raise BadInput("use only one of --head, --worker and --all")
    if previous and follow:
        raise BadInput("--previous shows a pod that has ended, which cannot be followed; leave out --follow")
    selection = Selection(slot=worker, is_all=all_pods, is_previous=previous)
    lines = _TAIL_OF_MANY if all_pods and follow and tail < 0 else tail
    with connected(context) as cluster:
        found = cluster.get("CollectorJob", job, namespace=namespace or cluster.namespace)
        if follow:
            _Following(cluster, found, selection, lines, has_times=timestamps).run()
            return
        pods = selection.choose(_pods(cluster, found, selection))
        if not pods:
            raise NoHead(_nothing(found, selection, cluster.options_of(found)))
        readable = [pod for pod in pods if pod.has_started]
        for pod in pods:
            if not pod.has_started:
                _say_silent(pod)
        if not readable:
            raise CommandFailed(f"none of the selected pods of {identity(found)} has started")
        for pod in readable:
            prefix = f"{pod.slot or HEAD} | " if len(pods) > 1 else ""
            options = LogOptions(container=pod.role, tail_lines=lines, has_times=timestamps)
            for line in _lines(cluster.log(pod.name, options, namespace=pod.raw["metadata"]["namespace"])):
                _print(prefix, line)


def _pods(cluster: Cluster, job: Raw, selection: Selection) -> list[JobPod]:
    pods = pods_of(cluster, job)
    slots = sorted({pod.slot for pod in pods if pod.slot})
    if selection.slot and selection.slot not in slots:
        hint = near_names(selection.slot, slots) or "; it has no workers at the moment"
        raise BadInput(f'{identity(job)} has no worker "{selection.slot}"{hint}')
    return pods


def _nothing(job: Raw, selection: Selection, options: str) -> str:
    if selection.is_previous:
        return (
            f"{identity(job)} has no earlier pod there: a pod that is replaced is deleted with its log once its "
            "successor runs"
        )
    for kind in ("Failed", "Suspended", "Completed"):
        if holds(job, kind):
            return f"{identity(job)} has no pods: it is {kind}, {why(condition(job, kind))}"
    return f"{identity(job)} has no pods yet; `cormorant doctor {job['metadata']['name']}{options}` says why"


def _say_silent(pod: JobPod) -> None:
    typer.echo(f"{pod.name} has not started: {why_waiting(pod) or f'it is {pod.phase}'}", err=True)


class _Following:
    """Logs of pods that come and go; one thread a pod, each line whole."""

    def __init__(self, cluster: Cluster, job: Raw, selection: Selection, tail: int, *, has_times: bool) -> None:
        self._cluster, self._job, self._selection = cluster, job, selection
        self._tail, self._has_times = tail, has_times
        self._threads: dict[str, threading.Thread] = {}
        self._said: set[str] = set()
        self._has_no_reader = False
        self._printing = threading.Lock()
        """Guards standard output."""

    def run(self) -> None:
        """Until the job has ended and all is said."""
        away_since = 0.0
        while True:
            try:
                is_over = self._look()
                away_since = 0.0
            except ClusterAway:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _AWAY_S:
                    raise
                is_over = False
            if self._has_no_reader:
                raise BrokenPipeError
            if is_over and not any(thread.is_alive() for thread in self._threads.values()):
                return
            time.sleep(_LOOK_S)

    def _look(self) -> bool:
        """Begin with the pods that are new. True when no more can come."""
        metadata = self._job["metadata"]
        job = self._cluster.find("CollectorJob", metadata["name"], namespace=metadata["namespace"])
        if job is None or job["metadata"]["uid"] != metadata["uid"]:
            return True
        is_over = holds(job, "Completed") or holds(job, "Failed") or holds(job, "Suspended")
        is_first = not self._threads
        pods = _pods(self._cluster, job, self._selection) if is_first else pods_of(self._cluster, job)
        chosen = self._selection.choose(pods)
        for pod in chosen:
            if pod.name in self._threads:
                continue
            if pod.has_started:
                self._begin(pod, tail=self._tail if is_first else -1)
            elif pod.name not in self._said:
                self._said.add(pod.name)
                _say_silent(pod)
        if is_over and not self._threads and not chosen:
            raise NoHead(_nothing(job, self._selection, self._cluster.options_of(job)))
        return is_over

    def _begin(self, pod: JobPod, *, tail: int) -> None:
        options = LogOptions(container=pod.role, is_followed=True, tail_lines=tail, has_times=self._has_times)
        prefix = f"{pod.slot or HEAD} | " if self._selection.is_all else ""
        thread = threading.Thread(target=self._copy, args=(pod, options, prefix), name=f"log-{pod.name}", daemon=True)
        self._threads[pod.name] = thread
        thread.start()

    def _copy(self, pod: JobPod, options: LogOptions, prefix: str) -> None:
        namespace = pod.raw["metadata"]["namespace"]
        try:
            for line in _lines(self._cluster.log(pod.name, options, namespace=namespace)):
                with self._printing:
                    _print(prefix, line)
        except ObjectMissing:
            return
        except BrokenPipeError:
            # The reader went away (`logs -f | head`): the main thread ends the command.
            self._has_no_reader = True
        except (CommandFailed, BadInput) as error:
            typer.echo(f"{prefix}{pod.name}: the log broke off: {error}", err=True)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, without their ends."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _print(prefix: str, line: bytes) -> None:
    sys.stdout.write(f"{prefix}{line.decode(errors='replace')}\n")
    sys.stdout.flush()
