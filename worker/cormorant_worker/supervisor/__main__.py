"""Process 1 of a job's pods.

    python -m cormorant_worker.supervisor head -- COMMAND...
    python -m cormorant_worker.supervisor worker

`head` ends with COMMAND's exit code, with 1 when Ray failed or ended first, or with 4 when Ray ended because it got no
CPU time, which does not count as a failure of the head. `worker` ends with 0 after SIGTERM, with 1 when the head runs
another version of Ray, which a new pod may cure, and with 3 when no worker can run in this pod (no device), which
another node may cure, or the head refuses its token; the reason is its termination message. Both end with 2 when their
arguments or settings are invalid. Settings come from the
environment: `settings.py`.
"""

import os
import signal
import sys
from collections.abc import Sequence

import structlog

from cormorant_worker.logs import LogContext, configure_logs
from cormorant_worker.pod_files import write_sentence
from cormorant_worker.supervisor.pods import PodBlocked, PodRefused, WorkerPod, run_head
from cormorant_worker.supervisor.probes import PodMetrics, PodProbes, PodState
from cormorant_worker.supervisor.settings import (
    SupervisorRefused,
    read_ray_settings,
    read_termination_path,
    read_worker_settings,
)

log = structlog.get_logger()

_OK, _FAILED, _REFUSED, _BLOCKED = 0, 1, 2, 3
_USAGE = "write `supervisor head -- COMMAND...` or `supervisor worker`"


def main(arguments: Sequence[str]) -> int:
    epoch = os.environ.get("CORMORANT_EPOCH", "")
    context = LogContext(job=os.environ.get("CORMORANT_JOB", ""), epoch=int(epoch) if epoch.isdecimal() else None)
    configure_logs(context)
    signals: list[int] = []  # recorded as they arrive, and handled in the supervisor's next turn
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    try:
        match list(arguments):
            case ["head", "--", _, *_]:
                last_words = read_termination_path(os.environ)
                return run_head(read_ray_settings(os.environ), arguments[2:], signals, last_words=last_words)
            case ["worker"]:
                settings, state = read_worker_settings(os.environ), PodState()
                context.group, context.worker = settings.group, settings.slot
                metrics = PodMetrics(state, job=settings.job, group=settings.group)
                with PodProbes(state, metrics, pod_ip=settings.ray.pod_ip, port=settings.probe_port) as probes:
                    log.info("supervising", slot=settings.slot, probe_port=probes.port)
                    WorkerPod(settings, signals, state).run()
                return _OK
            case _:
                raise SupervisorRefused(f"the arguments are {list(arguments)}; {_USAGE}")  # noqa: TRY301  # one way out
    except SupervisorRefused as error:
        log.critical("supervisor_refused", reason=str(error))
        return _REFUSED
    except (PodRefused, PodBlocked) as error:
        is_blocked = isinstance(error, PodBlocked)
        log.critical("pod_blocked" if is_blocked else "pod_refused", reason=str(error))
        write_sentence(read_termination_path(os.environ), str(error))
        return _BLOCKED if is_blocked else _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
