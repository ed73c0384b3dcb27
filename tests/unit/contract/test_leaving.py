"""How processes end."""

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from cormorant_contract.leaving import leave
threading.Thread(target=time.sleep, args=(60,)).start()
atexit.register(print, "closed", flush=True)
print("before")
leave(7)
"""


def test_leaving_waits_for_no_thread_and_runs_exit_functions() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (7, "before\nclosed\n", "")
