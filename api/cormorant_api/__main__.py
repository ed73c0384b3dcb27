"""`python -m cormorant_api --job job.yaml --fleet local|ray`: the head of one job.

Exit codes: 0 when all frames are delivered and acknowledged, 143 or 130 after SIGTERM or SIGINT, 1 when the fleet
failed, 2 for invalid input, 3 when a disk or device must be fixed first.
"""

import argparse
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from cormorant_api.errors import EXIT_DONE, EXIT_REFUSED, HeadFault, exit_code_of
from cormorant_api.settings import HeadSettings, listen_early
from cormorant_contract.leaving import leave
from cormorant_worker.errors import CormorantError, FleetInterrupted
from cormorant_worker.logs import LogContext, configure_logs
from cormorant_worker.pod_files import PodFile, explain_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from cormorant_worker.fleet.transport import Engine

_SIGNAL_BASE = 128
_LOOK_S = 0.05


class Signals:
    """SIGTERM and SIGINT: the first drains, the second exits immediately. The first also exits immediately while there
    is nothing to close, such as during slow imports.

    Neither raises: an exception inside Ray's code would abort the process.
    """

    def __init__(self) -> None:
        """Install both handlers. Main thread only."""
        self.number = 0
        self.is_idle = True
        """Nothing needs to be closed yet; a fork server ends by itself."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def has_come(self) -> bool:
        return bool(self.number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number or self.is_idle:
            os._exit(_SIGNAL_BASE + number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a head. Returns the exit code."""
    given = _parser().parse_args(arguments)
    context = LogContext(epoch=given.epoch or None)
    configure_logs(context)
    log = structlog.get_logger()
    signals = Signals()
    names = {field.name for field in fields(HeadSettings)} - {"host"}
    host = listen_host(given.host, pod_ip=os.environ.get("POD_IP", ""))
    settings = HeadSettings(host=host, **{name: value for name, value in vars(given).items() if name in names})
    try:
        settings.check()
        listen_early(settings.host, settings.port)
        # Slow imports come after the port is open, the slowest after the manifest is checked.
        from cormorant_worker.fork_server import WORKERS, fork_server
        from cormorant_worker.launch import load_job, refuse_unknown_names

        job = load_job(given.job)
        context.job = job.metadata.name
        refuse_unknown_names(job, is_this_machine=given.fleet == "local")
        if given.fleet == "local":
            fork_server(WORKERS)  # workers' modules are imported in parallel with the head's
        from cormorant_api.server import HeadServer
        from cormorant_worker.fleet.options import FleetOptions

        signals.is_idle = False
        with HeadServer(job, settings, context) as server:
            options = FleetOptions(
                workers=given.workers or None, device=given.device or None, should_stop=signals.has_come
            )
            server.start_fleet(options, engine=_engine(given, signals.has_come))
            end = server.wait(signals.has_come)
    except FleetInterrupted:
        end = "interrupted"  # the fleet had not started: nothing to drain
    except (HeadFault, CormorantError) as error:
        code = exit_code_of(error)
        log.critical("head_refused" if code == EXIT_REFUSED else "head_failed", reason=str(error), exit_code=code)
        explain_end(given.termination_message_file, str(error), frames=given.floor_frames)
        return code
    log.info("head_ended", reason=end)
    return EXIT_DONE if end == "done" else _SIGNAL_BASE + (signals.number or signal.SIGTERM)


def _engine(given: argparse.Namespace, should_stop: "Callable[[], bool]") -> "Engine | None":
    if given.fleet == "local":
        return None
    try:
        from cormorant_worker.fleet.options import RayOptions
        from cormorant_worker.fleet.ray.engine import RayEngine
    except ImportError as error:
        raise HeadFault(
            f"--fleet ray needs {error.name}, which is not installed: pip install 'cormorant[ray]'"
        ) from error
    # Meanwhile the pod's supervisor starts Ray; it ends this process if Ray takes too long.
    ready = PodFile.READY.path
    while ready is not None and not ready.exists():
        if should_stop():
            raise FleetInterrupted("stopped while Ray was starting")
        time.sleep(_LOOK_S)
    return RayEngine(RayOptions(address=given.ray_address or None, slot_resources=given.ray_slot_resources))


def listen_host(given: str, *, pod_ip: str) -> str:
    """In an IPv6-only pod 0.0.0.0 is unreachable; listen on :: there."""
    return "::" if given == "0.0.0.0" and ":" in pod_ip else given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cormorant_api", description="The head of one CollectorJob.")
    parser.set_defaults(**asdict(HeadSettings()))
    parser.add_argument("--job", required=True, help="Manifest file of the job.")
    parser.add_argument("--fleet", choices=("local", "ray"), default="local")
    parser.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS", ""),
        help='Ray cluster: "auto" or host:port (default: RAY_ADDRESS; empty: start one).',
    )
    parser.add_argument(
        "--ray-slot-resources",
        action="store_true",
        help='Place worker cpu-0 on the node with the Ray resource "slot:cpu-0".',
    )
    parser.add_argument(
        "--device",
        default=os.environ.get("CORMORANT_DEVICE", ""),
        help='Torch device of every policy, for tests without a GPU (default: CORMORANT_DEVICE, else "cuda" in gpu '
        'groups and "cpu" in others).',
    )
    parser.add_argument("--workers", type=int, default=0, help="Number of workers (default: from the manifest).")
    parser.add_argument("--host", help="Address to listen on.")
    parser.add_argument("--port", type=_from(0, 1 << 16), help="Control port (0: any free port).")
    parser.add_argument(
        "--data-port", type=_from(0, 1 << 16), help="Port for batches, weights and state (0: the next port)."
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="Directory for weights, the frame count and tokens (default: keep them in memory).",
    )
    parser.add_argument(
        "--token-file", type=Path, help="JSON file with the read, write and operator tokens; created if missing."
    )
    parser.add_argument(
        "--no-tokens", dest="has_tokens", action="store_false", help="Serve without tokens; loopback only."
    )
    parser.add_argument("--tls-cert", type=Path, help="TLS certificate file (PEM).")
    parser.add_argument("--tls-key", type=Path, help="TLS key file (PEM).")
    parser.add_argument(
        "--epoch", type=_from(0), help="Number of this head in the job, from 1 (0: count in --directory)."
    )
    parser.add_argument("--floor-frames", type=_from(0), help="Frames settled by earlier heads.")
    parser.add_argument(
        "--published-version",
        type=_from(0),
        default=os.environ.get("CORMORANT_PUBLISHED_VERSION", "0"),  # older heads ignore a variable, not an option
        help="Newest version of the weights that earlier heads published (default: CORMORANT_PUBLISHED_VERSION, or 0).",
    )
    parser.add_argument(
        "--last-words",
        dest="termination_message_file",
        type=Path,
        help="File for the settled frames and the reason of the end, as JSON.",
    )
    parser.add_argument("--ack-within", dest="ack_within_s", type=float, help="Seconds to acknowledge a batch.")
    parser.add_argument("--drain-seconds", dest="drain_s", type=float, help="Seconds to drain after SIGTERM.")
    parser.add_argument(
        "--linger-seconds", dest="linger_s", type=float, help="Seconds to stay after the job is complete."
    )
    return parser


def _from(low: int, below: float = math.inf) -> "Callable[[str], int]":
    def number(text: str) -> int:
        if not low <= (found := int(text)) < below:
            raise ValueError
        return found

    return number


if __name__ == "__main__":
    leave(main())
