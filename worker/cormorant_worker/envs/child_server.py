"""`python -m cormorant_worker.envs.child_server SOCKET`: the fork server of environments in processes of their own."""

from cormorant_worker.envs.child import run_child
from cormorant_worker.fork_loop import run

if __name__ == "__main__":
    run(run_child)
