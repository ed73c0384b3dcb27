"""Runs the command line and says how it ended: 0 done, 1 failed, 2 bad input, 130 interrupted."""

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130

try:
    import typer

    from cormorant_cli.app import app
    from cormorant_cli.errors import CliError
    from cormorant_contract.errors import ManifestError
    from cormorant_contract.leaving import leave
except KeyboardInterrupt:  # Ctrl-C while Python still imports
    sys.stderr.write("interrupted\n")
    os._exit(INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    leave(run(arguments))


def kubectl_main() -> None:
    """As `main`, under the name of a plugin: kubectl runs `kubectl-cormorant` for `kubectl cormorant`."""
    leave(run(prog_name="kubectl cormorant"))


def run(arguments: Sequence[str] | None = None, *, prog_name: str = "cormorant") -> int:
    """Run one command and return its exit code; what went wrong stands on stderr in one sentence."""
    try:
        code = app(arguments, prog_name=prog_name, standalone_mode=False)
    except ManifestError as error:
        return _end(str(error), 2)
    except CliError as error:
        return _end(str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):  # typer lets Ctrl-C through while it builds its commands
        return _end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`cormorant crd | head`): stdout cannot be written, also not at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Usage errors: typer brings its own click along, so they are known by what they can do.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C
        return _end("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _end(sentence: str, code: int) -> int:
    typer.echo(sentence, err=True)
    return code


if __name__ == "__main__":
    main()
