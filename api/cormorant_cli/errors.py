"""How a command ends badly.

CliError             exit code 1; every one is a sentence for the user
  CommandFailed      the work was begun and did not succeed; exit code 1
  BadInput           what the user wrote cannot be used; exit code 2

cormorant_contract.ManifestError ends a command with exit code 2 as well, KeyboardInterrupt with 130.
"""


class CliError(Exception):
    """Ends the command with its message on stderr and `exit_code`."""

    exit_code = 1


class CommandFailed(CliError):
    """The command's work did not succeed. Commands translate the errors of heavier rooms into this."""


class BadInput(CliError):
    """An option or a file of the user cannot be used."""

    exit_code = 2
