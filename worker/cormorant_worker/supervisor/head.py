"""The supervisor of a head's pod: Ray's head and the command start together, and the command's end is the pod's.

COMMAND imports what it needs -> Ray answers: the ready file appears -> COMMAND connects -> ends -> its exit code
                              -> Ray ends                            -> COMMAND is killed -> 1, or 4
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from cormorant_worker.pod_files import PodFile, explain_end
from cormorant_worker.supervisor import processes, ray_command
from cormorant_worker.supervisor.diagnosis import has_starved
from cormorant_worker.supervisor.processes import Child, exit_code
from cormorant_worker.supervisor.settings import RaySettings

log = structlog.get_logger()

_TICK_S = 0.1
_START_S = 120.0
"""From `ray start` to its answer, on a busy node."""
_RAY_ENDS_S = 3.0
"""A command that Ray ended may end before `ray start` does, which looks once a second."""
_BY_RAY = (1, 134)
"""Exit codes of a command that lost its Ray."""
_LAST_WORDS = 500
"""Characters of Ray's last words that are logged."""
_FAILED, _STARVED = 1, 4
_NICE = 5
"""Niceness of the head's command: Ray beside it gets CPU time first."""


def run_head(settings: RaySettings, command: Sequence[str], signals: Sequence[int], *, last_words: Path | None) -> int:
    """Run the command beside a Ray head. Returns the exit code; nothing is left of Ray then."""
    processes.adopt_orphans()
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
    ray = Child(ray_command.head_command(settings), environment, watch_for=ray_command.STARTED)
    known, passed_on, is_ready = [process.pid, ray.pid], 0, False
    try:
        while (code := exit_code(process.poll())) is None:
            for number in signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            if ray.has_said and not is_ready:
                is_ready = True
                settings.path(PodFile.READY).touch()
                log.info("ray_ready", seconds=round(ray.lived_s(), 1))
            if ray.poll() is not None or (not is_ready and ray.lived_s() > _START_S):
                # Its command holds nothing that the next head lacks: what is settled stands in its termination message.
                process.kill()
                process.wait()
                return _explain_end(ray, last_words, is_ready=is_ready)
            processes.reap(known)
            time.sleep(_TICK_S)
        if code in _BY_RAY and is_ready:
            deadline = time.monotonic() + _RAY_ENDS_S
            while ray.poll() is None and time.monotonic() < deadline:
                processes.reap(known)
                time.sleep(_TICK_S)
            if has_starved(ray.output_tail()):
                return _explain_end(ray, last_words, is_ready=True)
        return code
    finally:
        processes.kill_all(known)


def _explain_end(ray: Child, last_words: Path | None, *, is_ready: bool) -> int:
    words, code = ray.output_tail(), ray.poll()
    is_starved = code is None or has_starved(words)
    if is_starved:
        what = "ended itself" if is_ready else "did not start"
        reason = (
            f"Ray's head {what}, as happens when its processes get no CPU time for half a minute; a new head "
            "starts. Give head.resources more CPU (requests, and no low limits.cpu), or the node less work"
        )
    elif is_ready:
        reason = (
            f"Ray's head has ended with code {code}, and with it every worker of this head; a new head "
            "starts them again"
        )
    else:
        reason = f"Ray is not running for this head: it ended with code {code}"
    log.critical("ray_ended" if is_ready else "ray_failed", reason=reason, text=words[-_LAST_WORDS:])
    explain_end(last_words, reason)
    return _STARVED if is_starved else _FAILED
