"""One address of this machine for each head: the operator keeps a connection to each, as it does in a cluster."""

import itertools
import resource

_NUMBERS = itertools.count(1)


def next_address() -> str:
    """An address of 127.0.0.0/8 that no other head has."""
    number = next(_NUMBERS)
    return f"127.{1 + (number >> 16)}.{(number >> 8) & 255}.{number & 255}"


def allow_many_connections() -> None:
    """Let this process, and those that it starts, open as many files as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
