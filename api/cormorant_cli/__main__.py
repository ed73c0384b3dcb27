"""Runs the command line and says how it ended: 0 done, 1 failed, 2 bad input, 130 interrupted."""

import json
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
_WITH_OUTPUT = ("submit", "doctor")
"""Commands with several formats: -o json|yaml|name."""

try:
    try:
        import typer
    except ModuleNotFoundError as error:
        sys.exit(f"the command line needs {error.name}, which is not installed: pip install 'cormorant[cli]'")

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
    words, is_json = in_one_spelling(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(words, prog_name=prog_name, standalone_mode=False)
    except ManifestError as error:
        return _end(str(error), 2, is_json=is_json)
    except CliError as error:
        return _end(str(error), error.exit_code, is_json=is_json)
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
        code = int(getattr(error, "exit_code", 2))
        if is_json:
            return _end(in_our_words(error.format_message()), code, is_json=True)  # type: ignore[attr-defined]  # as above
        error.message = in_our_words(error.message)  # type: ignore[attr-defined]  # what `show` prints
        show()
        return code
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C
        return _end("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def in_one_spelling(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`--json` and `-o json` are one option, which each command knows by one of the names. Returns the words of the
    command with that name, and True where it is asked for: errors are JSON then, too.
    """
    given, words, is_json = list(arguments), list[str](), False
    command = next((word for word in given if not word.startswith("-")), "")
    long = "--output" if command != "evaluate" else "-o"  # a folder there
    while given:
        word = given.pop(0)
        is_pair = word in ("-o", long) and given[:1] == ["json"]
        if is_pair:
            given.pop(0)
        if is_pair or word in ("--json", "-ojson", f"{long}=json"):
            is_json = True
        else:
            words.append(word)
    if is_json:
        words += ["-o", "json"] if command in _WITH_OUTPUT else ["--json"]
    return words, is_json


def in_our_words(message: str) -> str:
    """A usage error without the words of the library that checks values."""
    message = message.replace("Value error, ", "").replace("Input should be ", "must be ")
    return message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _end(sentence: str, code: int, *, is_json: bool = False) -> int:
    typer.echo(json.dumps({"error": sentence, "exit_code": code}) if is_json else sentence, err=True)
    return code


if __name__ == "__main__":
    main()
