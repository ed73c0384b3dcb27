"""How processes end: a head refuses wrong input for good, waits for a volume or a device, and tries the rest again."""

import errno
import subprocess
import sys

import pytest

from cormorant_api.errors import HeadFault, StoreError, TokenError, exit_code_of
from cormorant_testing.scripts import run_script
from cormorant_worker.errors import (
    CormorantError,
    DatasetError,
    DeviceUnavailable,
    EnvBuildError,
    EnvCrashed,
    ManifestError,
    WorkerFailed,
)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ManifestError("numEnvs"), 2),
        (EnvBuildError("takes no such argument"), 2),
        (HeadFault("--tls-cert and --tls-key must be given together"), 2),
        (caused(ManifestError("cannot read nope.yaml"), FileNotFoundError("nope.yaml")), 2),
        (WorkerFailed("no such policy", kind="PolicyLoadError"), 2),
        (WorkerFailed("cpu-0 was killed"), 1),
        (WorkerFailed("it raised", kind="EnvCrashed"), 1),
        (EnvCrashed("it raised"), 1),
        (CormorantError("anything else"), 1),
        (StoreError("the disk did not take weights"), 3),
        (TokenError("others changed the Secret"), 3),
        (caused(DatasetError("full"), OSError(errno.ENOSPC, "no space left")), 3),
        (caused(DatasetError("stale"), caused(ValueError("x"), OSError(errno.ESTALE, "stale"))), 3),
        (caused(EnvBuildError("roms"), PermissionError("roms")), 3),
        (DeviceUnavailable("no GPU"), 3),
        (WorkerFailed("gpu-0: no GPU", kind="DeviceUnavailable"), 3),
    ],
)
def test_exit_codes_tell_input_from_weather(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_signal_ends_a_head_at_once_that_has_nothing_to_close() -> None:
    program = (
        "import os, signal; from cormorant_api.__main__ import Signals; signals = Signals(); {}"
        "os.kill(os.getpid(), signal.SIGTERM); print(signals.number)"
    )
    for setting, end in (("", (143, "")), ("signals.is_idle = False; ", (0, "15\n"))):
        command = [sys.executable, "-c", program.format(setting)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == end, done.stderr


PROGRAM = """
import atexit, threading, time
from cormorant_contract.leaving import leave
threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(print, "closed", flush=True)
print("before")
leave(7)
"""


def test_leaving_waits_for_no_thread_and_runs_exit_functions() -> None:
    done = run_script(PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (7, "before\nclosed\n", "")
