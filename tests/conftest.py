"""What holds for all tests."""

import os
import signal

from hypothesis import settings

from cormorant_testing import needs


def pytest_configure() -> None:
    needs.required()  # a name that it does not know is refused before any test runs
    # A shell may start background jobs with Ctrl-C ignored; commands that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray runs its workers with niceness 15: beside other tests they would get next to no processor time.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Hypothesis fails examples that take longer than 200 ms, as any may on a busy machine.
    settings.register_profile("cormorant", deadline=None)
    settings.load_profile("cormorant")
