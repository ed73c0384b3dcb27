"""`python -m cormorant_testing.killed_head WHEN FUNCTION WORD ...`: a head that dies at one step, as by `kill -9`.

It dies before or after (WHEN) it calls FUNCTION (`module:Class.name`) with WORD among the arguments; empty: any.
"""

import functools
import os
import signal
import sys
from importlib import import_module
from typing import Any

from cormorant_api.__main__ import main


def kill_at(when: str, function: str, word: str) -> None:
    module, _, path = function.partition(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, import_module(module))
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_step = not word or word in args
        if is_step and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if is_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


if __name__ == "__main__":
    kill_at(*sys.argv[1:4])
    sys.exit(main(sys.argv[4:]))
