"""Process 1 of a job's pods.

    python -m cormorant_worker.supervisor head -- COMMAND...
    python -m cormorant_worker.supervisor worker

`head` ends with COMMAND's exit code, or 1 when Ray failed or ended first, or 143 when SIGTERM came before COMMAND ran.
`worker` ends with 0 after SIGTERM and 1 when the head refuses it, which a new pod may cure. Both end with 2 when what
they were given cannot be used. Settings come from the environment: `settings.py`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from cormorant_worker.errors import PodRefused, SupervisorRefused
from cormorant_worker.logs import LogContext, configure_logs
from cormorant_worker.supervisor.head import Head
from cormorant_worker.supervisor.metrics import PodMetrics
from cormorant_worker.supervisor.probes import Probes
from cormorant_worker.supervisor.ray_command import pulse_file
from cormorant_worker.supervisor.settings import read_last_words, read_ray_settings, read_worker_settings
from cormorant_worker.supervisor.signals import Signals
from cormorant_worker.supervisor.standing import Standing
from cormorant_worker.supervisor.worker import Worker

log = structlog.get_logger()

_OK, _FAILED, _REFUSED = 0, 1, 2
_USAGE = "write `supervisor head -- COMMAND...` or `supervisor worker`"


def main(arguments: Sequence[str]) -> int:
    """Run a supervisor. Returns the exit code."""
    context = LogContext(job=os.environ.get("CORMORANT_JOB", ""), epoch=_epoch(os.environ.get("CORMORANT_EPOCH", "")))
    configure_logs(context)
    signals = Signals()
    signals.install()
    try:
        match list(arguments):
            case ["head", "--", _, *_]:
                last_words = read_last_words(os.environ)
                return Head(read_ray_settings(os.environ), arguments[2:], signals, last_words=last_words).run()
            case ["worker"]:
                return _supervise_worker(signals, context)
            case _:
                raise SupervisorRefused(f"the arguments are {list(arguments)}; {_USAGE}")  # noqa: TRY301  # one way out
    except SupervisorRefused as error:
        log.critical("supervisor_refused", reason=str(error))
        return _REFUSED
    except PodRefused as error:
        log.critical("pod_refused", reason=str(error))
        return _FAILED


def _supervise_worker(signals: Signals, context: LogContext) -> int:
    settings, standing = read_worker_settings(os.environ), Standing()
    context.group, context.worker = settings.group, settings.slot
    try:
        metrics = PodMetrics(
            standing, job=settings.job, group=settings.group, pulse_file=Path(pulse_file(settings.ray))
        )
        probes = Probes(standing, metrics, pod_ip=settings.ray.pod_ip, port=settings.probe_port)
    except OSError as error:
        raise SupervisorRefused(f"cannot listen on port {settings.probe_port} for probes: {error}") from error
    log.info("supervising", slot=settings.slot, attempt=settings.attempt, probe_port=probes.port)
    try:
        Worker(settings, signals, standing).run()
    finally:
        probes.close()
    return _OK


def _epoch(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
