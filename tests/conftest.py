"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    # A shell may start background jobs with Ctrl-C ignored; commands that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
