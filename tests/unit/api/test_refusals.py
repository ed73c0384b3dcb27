"""What a head refuses, and for how long: exit codes tell wrong input from what may pass; roles by token, token files
and addresses.
"""

import errno
import json
import stat
from pathlib import Path

import pytest

from cormorant_api.errors import ApiError, HeadFault, StoreError, TokenError, exit_code_of
from cormorant_api.http.tokens import HeadTokens, Role, write_tokens
from cormorant_api.routes.routing import refuse_other_hosts
from cormorant_api.settings import HeadSettings
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

TOKENS = {Role.READ: "r" * 20, Role.WRITE: "w" * 20, Role.OPERATOR: "o" * 20}


@pytest.fixture
def tokens(tmp_path: Path) -> HeadTokens:
    write_tokens(tmp_path / "tokens.json", TOKENS)
    return HeadTokens(tmp_path / "tokens.json")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic " + "r" * 20, "Bearer r", "Bearer " + "r" * 21, "Bearer ü", "r" * 20],
)
def test_anything_else_proves_nothing(tokens: HeadTokens, header: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        tokens.demand(Role.READ, header, what="it")
    assert refused.value.status == 401


def test_a_role_may_do_what_those_below_it_may(tokens: HeadTokens) -> None:
    bearer = "Bearer " + "w" * 20
    assert tokens.demand(Role.READ, bearer, what="GET /x") is Role.WRITE
    with pytest.raises(ApiError, match="PUT /x needs the operator token; you sent the write token") as refused:
        tokens.demand(Role.OPERATOR, bearer, what="PUT /x")
    assert (refused.value.status, refused.value.members) == (403, {"role": "operator"})


def test_a_token_file_is_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens.json"
    made = HeadTokens(path).by_role
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert HeadTokens(path).by_role == made
    assert len(set(made.values())) == 3
    with pytest.raises(TokenError, match="cannot write tokens"):
        write_tokens(path, made)
    path.chmod(0o644)
    with pytest.raises(TokenError, match=r"mode 0644.*chmod 600"):
        HeadTokens(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot read"),
        ("[]", "must contain a JSON object"),
        (json.dumps({"read": "x" * 20}), "must contain a JSON object"),
        (json.dumps({"read": "x" * 20, "write": 5, "operator": "z" * 20}), "an ASCII string of at least 16"),
        (json.dumps({"read": "x" * 20, "write": "short", "operator": "z" * 20}), "an ASCII string of at least 16"),
        (json.dumps({"read": "x" * 20, "write": "x" * 20, "operator": "z" * 20}), "same token"),
    ],
)
def test_a_token_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(TokenError, match=reason):
        HeadTokens(path)


def test_without_tokens_a_head_listens_on_loopback_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        HeadSettings(host=host, has_tokens=False).check()
    for host in ("0.0.0.0", "10.0.0.1", "head"):
        HeadSettings(host=host).check()
        with pytest.raises(HeadFault, match="loopback only"):
            HeadSettings(host=host, has_tokens=False).check()


def test_tokens_are_read_again_when_their_file_has_changed(tokens: HeadTokens, tmp_path: Path) -> None:
    path, old, new = tmp_path / "tokens.json", "Bearer " + "o" * 20, "Bearer " + "o" * 20 + "2"
    path.write_text("not JSON")  # half of a change: what was read before holds
    with pytest.raises(ApiError):
        tokens.demand(Role.OPERATOR, new, what="it")
    assert tokens.demand(Role.OPERATOR, old, what="it") is Role.OPERATOR
    path.unlink()
    write_tokens(path, {role: token + "2" for role, token in TOKENS.items()})
    with pytest.raises(ApiError):
        tokens.demand(Role.OPERATOR, old, what="it")
    assert tokens.demand(Role.OPERATOR, new, what="it") is Role.OPERATOR


def test_a_name_that_was_made_to_lead_here_is_refused() -> None:
    for host in ("", "localhost:8000", "job.localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "lo"):
        refuse_other_hosts({"host": host}, listens_on="lo", what="GET /v1/status")
    for host in ("rebound.example:8000", "10.0.0.1", "localhost.example.org", "[::2]:8000"):
        with pytest.raises(ApiError, match="http://localhost, or start the head with tokens") as refused:
            refuse_other_hosts({"host": host}, listens_on="127.0.0.1", what="GET /v1/status")
        assert refused.value.status == 403


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
        done = run_script(program.format(setting))
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
