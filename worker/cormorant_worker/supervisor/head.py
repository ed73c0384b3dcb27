"""The supervisor of a head's pod: Ray's head first, then the command, and the command's end is the pod's.

Ray starts -> it answers -> COMMAND runs -> COMMAND ends -> Ray is killed -> COMMAND's exit code
                                         -> Ray ends     -> COMMAND is ended -> 1
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from cormorant_worker.supervisor import processes, ray_command
from cormorant_worker.supervisor.diagnosis import probe_head
from cormorant_worker.supervisor.processes import Child, PodSignals, exit_code
from cormorant_worker.supervisor.settings import RaySettings
from cormorant_worker.termination_message import explain

log = structlog.get_logger()

_TICK_S = 0.1
_START_S = 120.0
"""From `ray start` to its answer, on a busy node."""
_LAST_WORDS_S = 15.0
"""For the command to end when Ray has: Ray ends its drivers itself, after RAY_gcs_rpc_server_reconnect_timeout_s."""
_LAST_WORDS = 500
"""Characters of Ray's last words that are logged."""
_FAILED = 1


class HeadPod:
    def __init__(
        self, settings: RaySettings, command: Sequence[str], signals: PodSignals, *, last_words: Path | None = None
    ) -> None:
        self._settings, self._command, self._signals = settings, command, signals
        self._last_words = last_words
        self._ray: Child | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run the command beside a Ray head. Returns the exit code; nothing is left of Ray then."""
        processes.adopt_orphans()
        shutil.rmtree(self._settings.folder, ignore_errors=True)
        try:
            if not self._start_ray():
                return self._signals.exit_code if self._signals else _FAILED
            return self._run_command()
        finally:
            processes.kill_all(self._known())

    def _start_ray(self) -> bool:
        environment = ray_command.ray_environment(os.environ, self._settings)
        ray = self._ray = Child(ray_command.head_command(self._settings), environment, watch_for=ray_command.STARTED)
        while not ray.has_said:
            if self._signals:
                return False
            if (code := ray.poll()) is not None or ray.lived_s() > _START_S:
                why = f"it did not start within {_START_S:.0f} s" if code is None else f"it ended with code {code}"
                log.critical(
                    "ray_failed",
                    reason=f"Ray is not running for this head: {why}",
                    text=ray.output_tail()[-_LAST_WORDS:],
                )
                return False
            self._look_around()
        if why := probe_head((self._settings.pod_ip, self._settings.gcs_port), limit_s=_LAST_WORDS_S):
            log.critical("ray_failed", reason=f"Ray has started but does not answer at its own address: {why}")
            return False
        log.info("ray_ready", seconds=round(ray.lived_s(), 1))
        return True

    def _run_command(self) -> int:
        assert self._ray is not None
        address = ray_command.join_address(self._settings.pod_ip, self._settings.gcs_port)
        try:
            process = self._process = subprocess.Popen(list(self._command), env={**os.environ, "RAY_ADDRESS": address})
        except OSError as error:
            log.critical("command_failed", reason=f"the head's command {self._command[0]!r} cannot be run: {error}")
            return _FAILED
        passed_on = 0
        while (code := exit_code(process.poll())) is None:
            for number in self._signals.received[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            if (ray_code := self._ray.poll()) is not None:
                reason = (
                    f"Ray's head has ended with code {ray_code}, and with it every worker of this head; a new head "
                    "starts them again"
                )
                log.critical("ray_ended", reason=reason, text=self._ray.output_tail()[-_LAST_WORDS:])
                # It may end by itself for a while, and is then killed with the rest.
                deadline = time.monotonic() + _LAST_WORDS_S
                while process.poll() is None and time.monotonic() < deadline:
                    self._look_around()
                explain(self._last_words, reason)
                return _FAILED
            self._look_around()
        return code

    def _look_around(self) -> None:
        processes.reap(self._known())
        time.sleep(_TICK_S)

    def _known(self) -> list[int]:
        return [process.pid for process in (self._ray, self._process) if process is not None]
