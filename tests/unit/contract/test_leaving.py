"""How processes end."""

from cormorant_testing.scripts import run_script

PROGRAM = """
import atexit, threading, time
from cormorant_contract.leaving import leave
threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(print, "closed", flush=True)
print("before")
leave(7)
"""


def test_leaving_waits_for_no_thread_and_runs_exit_functions() -> None:
    done = run_script(PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (7, "before\nclosed\n", "")
