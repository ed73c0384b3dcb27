"""The end of a process. Called by the command line and by a head's `__main__`."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with an exit code. Everything that must be closed has been closed before.

    Once torch is imported, even in part, the interpreter's own shutdown takes seconds on a busy machine (9 of the 13 s
    after Ctrl-C at load 20), and it waits for threads that still answer a request. Both are skipped; `atexit` functions
    run.
    """
    for stream in (sys.stdout, sys.stderr):
        # The reader went away, the stream is closed, or it is None: the process was started without it.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()  # Ray's and logging's among them
    os._exit(code)
