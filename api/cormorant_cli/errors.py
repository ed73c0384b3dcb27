"""How a command ends badly.

CliError             exit code 1; every one is a sentence for the user
  CommandFailed      the work was begun and did not succeed; errors of heavier rooms are translated into this
    ClusterFailed      the API server refused, or does not answer
      ObjectMissing      there is no object of that name, or no such kind
      NotAllowed         the user may not do that
      ObjectConflict     another writer changed it, or owns it
      ClusterAway        no answer within the time
    NotReady           what the job lacks may come
      HeadAway           the head does not answer
      NoHead             the job has no head that could answer
        HeadGone           nor will it have one: it has ended
  BadInput           what the user wrote cannot be used; exit code 2

cormorant_contract.errors.ManifestError ends a command with exit code 2 as well, KeyboardInterrupt with 130.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cormorant_contract.extras import missing_library

INTERRUPTED = 130


class CliError(Exception):
    """Ends the command with its message on stderr and `exit_code`."""

    exit_code = 1


class CommandFailed(CliError): ...


class ClusterFailed(CommandFailed): ...


class ObjectMissing(ClusterFailed): ...


class NotAllowed(ClusterFailed): ...


class ObjectConflict(ClusterFailed): ...


class ClusterAway(ClusterFailed): ...


class NotReady(CommandFailed): ...


class HeadAway(NotReady): ...


class NoHead(NotReady): ...


class HeadGone(NoHead): ...


class BadInput(CliError):
    exit_code = 2


@contextmanager
def installed(extra: str) -> Iterator[None]:
    """Inside, an import that fails becomes a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandFailed(missing_library(error, extra, what="this command")) from error
