"""`python -m cormorant_testing.killed_head WHEN FUNCTION WORD ...`: a head that dies at one step, as by `kill -9`.

It dies before or after (WHEN) it calls FUNCTION (`module.Class.name`) with WORD among the arguments; empty: any.
"""

import os
import signal
import sys
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from cormorant_api.__main__ import main


def kill_at(when: str, function: str, word: str) -> None:
    real = resolve_name(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_step = not word or word in args
        if is_step and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if is_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    patch(function, call).start()


if __name__ == "__main__":
    kill_at(*sys.argv[1:4])
    sys.exit(main(sys.argv[4:]))
