"""Runs the command line and says how it ended: 0 done, 1 failed, 2 bad input, 130 interrupted."""

# The interpreter's part of `signal`, which takes milliseconds to import: Ctrl-C would end those with a traceback.
import _signal as signal  # type: ignore[import-not-found]  # typeshed lists it as `signal` alone

# Ctrl-C during imports ends the process by the signal. An exception could be lost: C code in imported modules clears
# exceptions that it does not expect.
handler = signal.getsignal(signal.SIGINT)
if handler is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    import errno
    import os
    import sys
    from collections.abc import Sequence

    import typer

    from cormorant_cli.app import app
    from cormorant_cli.errors import INTERRUPTED, CliError
    from cormorant_cli.printing import say_end, speak_json, speaks_json
    from cormorant_contract.errors import ManifestError
    from cormorant_contract.leaving import leave
except ModuleNotFoundError as error:
    sys.exit(f"the command line needs {error.name}, which is not installed: pip install 'cormorant[cli]'")
finally:
    signal.signal(signal.SIGINT, handler)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    leave(run(arguments))


def kubectl_main() -> None:
    """Entry point of the kubectl plugin: kubectl runs `kubectl-cormorant` for `kubectl cormorant`."""
    leave(run(prog_name="kubectl cormorant"))


def run(arguments: Sequence[str] | None = None, *, prog_name: str = "cormorant") -> int:
    """Run one command and return its exit code; an error is printed on stderr in one sentence."""
    words, is_json = without_json(sys.argv[1:] if arguments is None else arguments)
    speak_json(is_json)
    try:
        code = app(words, prog_name=prog_name, standalone_mode=False)
    except ManifestError as error:
        return say_end(str(error), 2)
    except CliError as error:
        return say_end(str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):  # typer lets Ctrl-C through while it builds its commands
        return say_end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe (`cormorant crd | head`): redirect stdout, which Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return say_end("the disk is full; free space, or write the output elsewhere", 1)
    except Exception as error:
        # Usage errors: typer vendors click, so they are recognized by their methods.
        show = getattr(error, "show", None)
        if show is None:
            raise
        code = int(getattr(error, "exit_code", 2))
        if speaks_json():
            return say_end(in_our_words(error.format_message()), code)  # type: ignore[attr-defined]  # as above
        error.message = in_our_words(error.message)  # type: ignore[attr-defined]  # what `show` prints
        show()
        return code
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C
        return say_end("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def without_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--json` or `-o json`, which every command takes, and whether one of them was there."""
    words = list[str]()
    for word in arguments:
        if word == "json" and words[-1:] == ["-o"]:
            words[-1] = "--json"
        else:
            words.append(word)
    return [word for word in words if word != "--json"], "--json" in words


def in_our_words(message: str) -> str:
    """A usage error without pydantic's phrases."""
    message = message.replace("Value error, ", "").replace("Input should be ", "must be ")
    return message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


if __name__ == "__main__":
    main()
