"""Errors that end a command.

CliError             exit code 1; each message is a sentence for the user
  CommandFailed      the work failed; errors of the worker, the head and the API server are translated into this
    ObjectMissing      the API server has no object of that name, or no such kind
    NotAllowed         the user lacks a permission
    NotReady           the job has no running head yet, or its head does not answer
      HeadGone           it has ended and will have none
  BadInput           invalid input; exit code 2
  Interrupted        Ctrl-C; exit code 130

cormorant_contract.errors.ManifestError ends a command with exit code 2 as well, KeyboardInterrupt with 130.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cormorant_contract.errors import missing_library

INTERRUPTED = 130


class CliError(Exception):
    """Ends the command with its message on stderr and `exit_code`."""

    exit_code = 1


class CommandFailed(CliError): ...


class ObjectMissing(CommandFailed): ...


class NotAllowed(CommandFailed): ...


class NotReady(CommandFailed): ...


class HeadGone(NotReady): ...


class BadInput(CliError):
    exit_code = 2


class Interrupted(CliError):
    exit_code = INTERRUPTED


@contextmanager
def installed(extra: str) -> Iterator[None]:
    """Within the block, a failed import becomes an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandFailed(missing_library(error, extra, what="this command")) from error
