"""`python -m cormorant_testing.chaos.head JOB DIRECTORY PORT DATA_PORT ENGINE WORKERS`: a head with short limits."""

import faulthandler
import signal
import sys
import threading
from pathlib import Path

from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_testing.chaos.world import CONTROL_S, HANG_S, STARTUP_S
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job
from cormorant_worker.logs import LogContext, configure_logs

ACK_WITHIN_S = 2.0


def main() -> None:
    job, directory, port, data_port, engine, workers = sys.argv[1:]
    configure_logs(LogContext())
    faulthandler.register(signal.SIGUSR1)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    settings = HeadSettings(
        port=int(port),
        data_port=int(data_port),
        directory=Path(directory),
        ack_within_s=ACK_WITHIN_S,
        apply_within_s=60.0,
        drain_s=5.0,
        linger_s=0.2,
    )
    options = FleetOptions(
        workers=int(workers),
        control_timeout_s=CONTROL_S,
        hang_timeout_s=HANG_S,
        startup_timeout_s=STARTUP_S[engine],
        should_stop=over.is_set,
    )
    workers_run_on = None
    if engine == "ray":
        from cormorant_worker.fleet.ray.engine import RayEngine

        workers_run_on = RayEngine()

    with HeadServer(load_job(job), settings) as server:
        server.start_fleet(options, engine=workers_run_on)
        server.wait(over.is_set)


if __name__ == "__main__":
    main()
