"""The supervisors of a job's pods. A worker's joins the head behind the Service, repeatedly, until SIGTERM:

probing -> starting -> joined -> (Ray ended: the rest of it is killed) -> probing ...
joined -> (no device) -> the actor ends -> Ray is killed -> PodBlocked
any of them -> SIGTERM -> leaving: the actor finishes or hands over its batch -> Ray is killed -> 0

In a head's pod Ray's head and the command start together, and the command's end is the pod's:

COMMAND imports what it needs -> Ray answers: the ready file appears -> COMMAND connects -> ends -> its exit code
                              -> Ray ends                            -> COMMAND is killed -> 1, or 4
"""

import ctypes
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from cormorant_worker.errors import CormorantError
from cormorant_worker.pod_files import ACTOR_TITLE, PodFile, explain_end
from cormorant_worker.supervisor import ray_command
from cormorant_worker.supervisor.diagnosis import HeadWatch, diagnose, has_starved
from cormorant_worker.supervisor.probes import PodState
from cormorant_worker.supervisor.settings import RaySettings, WorkerSettings

log = structlog.get_logger()

_TICK_S = 0.1
_PROBE_S = 5.0
_BETWEEN_PROBES_S = 0.5
"""A connection costs nothing, unlike `ray start`: no back-off."""
_COMPLAIN_S = 30.0
"""Between two log lines about an absent head."""
_JOIN_S = 120.0
"""From `ray start` to membership, on a node where many pods start; Ray itself gives up a wrong token after 20 s."""
_REPORT_S = 10.0
"""For the head to hear from the actor why no worker can run here, and to end it."""
_LAST_WORDS = 500
"""Characters of Ray's last words that are logged."""
_MOST_REFUSALS = 3
"""In a row, after which this pod is given up: a new one may have the right token or image."""
_PAUSE_S = 1.0
"""Before Ray is started again, which takes seconds itself."""
_KILL_MARGIN_S = 5.0
"""Seconds of the grace period that are reserved for stopping Ray."""

_START_S = 120.0
"""From `ray start` to the answer of a head's Ray, on a busy node."""
_RAY_ENDS_S = 3.0
"""A command that Ray ended may end before `ray start` does, which looks once a second."""
_BY_RAY = (1, 134)
"""Exit codes of a command that lost its Ray."""
_FAILED, _STARVED = 1, 4
_NICE = 5
"""Niceness of the head's command: Ray beside it gets CPU time first."""

_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
_TAIL_LINES = 100
_SIGNAL_BASE = 128
"""A process that signal n ended has the exit code 128 + n."""


class PodRefused(CormorantError):
    """The head refuses this pod, whose image differs (exit code 1). A new pod may have the right image."""


class PodBlocked(CormorantError):
    """The pod lacks something that its workers need, such as a device or the head's token (exit code 3)."""


class WorkerPod:
    def __init__(self, settings: WorkerSettings, signals: Sequence[int], state: PodState) -> None:
        self._settings, self._signals, self._state = settings, signals, state
        self._head = f"{settings.head[0]}:{settings.head[1]}"
        self._watch = HeadWatch(settings.head)
        self._blocked = settings.ray.path(PodFile.BLOCKED)
        self._refusals = 0
        self._ray: Ray | None = None

    def run(self) -> None:
        """Supervise until SIGTERM. Returns when nothing is left of Ray. Raises PodRefused where the head has refused
        this pod's Ray version too often, PodBlocked where no worker can run in this pod, or its token was refused too
        often.
        """
        adopt_orphans()
        # Whatever lies there is another pod's: this one has just begun.
        self._forget_ray()
        shutil.rmtree(self._settings.ray.path(PodFile.KEPT), ignore_errors=True)
        try:
            while not self._signals:
                self._live_once()
            self._leave()
        finally:
            self._clean_up()

    def _live_once(self) -> None:
        """Join a head, as soon as one accepts connections, and stay for as long as it does."""
        began = time.monotonic()
        told = began - _COMPLAIN_S + _PROBE_S
        while why := self._watch.connect(limit_s=_PROBE_S):
            if (now := time.monotonic()) - told > _COMPLAIN_S:
                told = now
                log.warning(
                    "head_unreachable",
                    reason=f"the head at {self._head} has not answered for {now - began:.0f} s ({why}); this pod "
                    "keeps waiting and joins when a head answers",
                )
            self._wait(_BETWEEN_PROBES_S)
            if self._signals:
                return
        environment = ray_command.ray_environment(os.environ, self._settings.ray)
        ray = self._ray = Ray(ray_command.worker_command(self._settings), environment)
        self._wait(_JOIN_S, until=lambda: ray.has_started or ray.poll() is not None)
        if has_joined := ray.has_started and ray.poll() is None:
            self._state.joins += 1
            self._state.is_joined = True
            log.info(
                "joined", head=self._head, slot=self._settings.slot, joins=self._state.joins,
                seconds=round(ray.lived_s(), 1),
            )  # fmt: skip
            self._wait(until=lambda: ray.poll() is not None or self._blocked.exists() or self._watch.is_head_gone())
        if self._signals:
            return
        self._state.is_joined = False
        if self._blocked.exists():
            # The head hears the reason from the actor first.
            self._wait(_REPORT_S, until=lambda: ray.poll() is not None or not _has_actor())
            raise PodBlocked(self._blocked.read_text())
        cause, sentence = diagnose(ray.output_tail(), code=ray.poll(), head=self._head, has_joined=has_joined)
        self._clean_up()
        if cause in ("token", "version"):
            self._refusals += 1
            if self._refusals >= _MOST_REFUSALS:
                # Tokens change with the operator's key, which is not a failure of the slot.
                kind = PodBlocked if cause == "token" else PodRefused
                raise kind(f"{sentence} ({self._refusals} attempts)")
            log.error("join_refused", cause=cause, reason=sentence, tries_left=_MOST_REFUSALS - self._refusals)
        else:
            self._refusals = 0
            log.warning("ray_ended", cause=cause, reason=sentence, text=ray.output_tail()[-_LAST_WORDS:])
        self._wait(_PAUSE_S)

    def _leave(self) -> None:
        """Have the actor finish or hand over its batch, within the grace period."""
        self._state.is_leaving = True
        self._state.is_joined = False
        began = time.monotonic()
        slot, limit_s = self._settings.slot, max(0.0, self._settings.grace_s - _KILL_MARGIN_S)

        def is_over() -> bool:
            return self._ray is None or self._ray.poll() is not None or not _has_actor()

        log.info("leaving", slot=slot, limit_s=limit_s)
        self._settings.ray.path(PodFile.LEAVE).touch()
        if self._wait(limit_s, until=is_over):
            log.info("left", slot=slot, seconds=round(time.monotonic() - began, 1))
        else:
            log.warning(
                "left_in_the_middle",
                slot=slot,
                reason=f"the worker did not finish its batch within {limit_s:.0f} s "
                "(CORMORANT_GRACE_SECONDS less the time to end Ray); the batch is collected again",
            )

    def _wait(self, seconds: float = math.inf, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Look around until something is so, the first signal came, or the time is over, which returns False."""
        deadline = time.monotonic() + seconds
        while (self._state.is_leaving or not self._signals) and not until():
            if time.monotonic() > deadline:
                return False
            self._state.ticked = time.monotonic()
            reap([self._ray] if self._ray is not None else [])
            time.sleep(_TICK_S)
        return True

    def _clean_up(self) -> None:
        """End whatever Ray has left: its ports and sockets must be free for the next start."""
        self._watch.close()
        kill_all([self._ray] if self._ray is not None else [])
        self._ray = None
        self._forget_ray()

    def _forget_ray(self) -> None:
        shutil.rmtree(self._settings.ray.folder, ignore_errors=True)
        for file in (PodFile.LEAVE, PodFile.BLOCKED):
            self._settings.ray.path(file).unlink(missing_ok=True)


def _has_actor() -> bool:
    for process in descendants():
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR_TITLE):
                return True
    return False


def run_head(settings: RaySettings, command: Sequence[str], signals: Sequence[int], *, last_words: Path | None) -> int:
    """Run the command beside a Ray head. Returns the exit code; nothing is left of Ray then."""
    adopt_orphans()
    shutil.rmtree(settings.folder, ignore_errors=True)
    settings.path(PodFile.READY).unlink(missing_ok=True)
    environment = ray_command.ray_environment(os.environ, settings)
    address = ray_command.join_address(settings.pod_ip, settings.gcs_port)
    try:
        process = subprocess.Popen(list(command), env={**environment, "RAY_ADDRESS": address})
    except OSError as error:
        log.critical("command_failed", reason=f"the head's command {command[0]!r} cannot be run: {error}")
        return _FAILED
    # On a busy node Ray comes first: workers wait for it, and nothing waits for the command's imports yet.
    os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    ray = Ray(ray_command.head_command(settings), environment)
    passed_on, is_ready = 0, False
    try:
        while (code := exit_code(process.poll())) is None:
            for number in signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            if ray.has_started and not is_ready:
                is_ready = True
                settings.path(PodFile.READY).touch()
                log.info("ray_ready", seconds=round(ray.lived_s(), 1))
            if ray.poll() is not None or (not is_ready and ray.lived_s() > _START_S):
                # Its command holds nothing that the next head lacks: what is settled stands in its termination message.
                process.kill()
                process.wait()
                return _explain_end(ray, last_words)
            reap([process, ray])
            time.sleep(_TICK_S)
        if code in _BY_RAY and is_ready:
            deadline = time.monotonic() + _RAY_ENDS_S
            while ray.poll() is None and time.monotonic() < deadline:
                reap([process, ray])
                time.sleep(_TICK_S)
            if has_starved(ray.output_tail()):
                return _explain_end(ray, last_words)
        return code
    finally:
        kill_all([process, ray])


def _explain_end(ray: "Ray", last_words: Path | None) -> int:
    words, code = ray.output_tail(), ray.poll()
    is_starved = code is None or has_starved(words)
    reason = (
        "Ray's head ended itself or did not start, as happens when its processes get no CPU time for half a minute; a "
        "new head starts. Give head.resources more CPU (requests, and no low limits.cpu), or the node less work"
        if is_starved
        else f"Ray's head has ended with code {code}, and with it every worker; a new head starts them again"
    )
    log.critical("ray_ended", reason=reason, text=words[-_LAST_WORDS:])
    explain_end(last_words, reason)
    return _STARVED if is_starved else _FAILED


# -- duties of process 1: its children are reaped and never survive it ---------------------------------------------


class Ray:
    """A process of `ray start`, whose output is read continuously; its last lines are kept."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.has_started = False
        """It has said that its node runs."""
        self._began = time.monotonic()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name="ray-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        return exit_code(self._process.poll())

    def lived_s(self) -> float:
        return time.monotonic() - self._began

    def output_tail(self) -> str:
        """Last lines of its output, complete once it has ended."""
        if self._process.poll() is not None:
            self._reader.join(1.0)  # what it started may hold the pipe open for longer
        return "\n".join(tuple(self._tail))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ray_command.STARTED in line:
                self.has_started = True
            if line.strip():
                self._tail.append(line.rstrip())


def exit_code(code: int | None) -> int | None:
    """A subprocess's return code as shells and Kubernetes write it."""
    return code if code is None or code >= 0 else _SIGNAL_BASE - code


def adopt_orphans() -> None:
    """Become the parent of orphans of children, as process 1 always is. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(own: Sequence["Ray | subprocess.Popen[bytes]"]) -> None:
    """Reap ended children: `own`, whose exit codes are kept, and orphans, which no other code waits for."""
    running = [process.pid for process in own if process.poll() is None]
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in running:
            os.waitpid(ended.si_pid, 0)


def kill_all(own: Sequence["Ray | subprocess.Popen[bytes]"]) -> None:
    """Kill every descendant process, and say so where some are left after ten seconds."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        reap(own)
        if not (left := descendants()):
            return
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    log.error("processes_left", reason="Ray processes survive SIGKILL: they are blocked in the kernel")


def descendants() -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children
