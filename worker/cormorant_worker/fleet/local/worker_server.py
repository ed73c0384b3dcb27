"""`python -m cormorant_worker.fleet.local.worker_server SOCKET`: the fork server of workers."""

from cormorant_worker.fleet.local.worker_main import run_worker
from cormorant_worker.fork_server import run

if __name__ == "__main__":
    run(run_worker)
