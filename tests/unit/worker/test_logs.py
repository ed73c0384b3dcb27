"""Log lines: the same fields on each, for machines, and lines for people on a terminal. Classes of errors."""

import inspect
import io
import json
from collections.abc import Iterator

import pytest
import structlog

from cormorant_worker import errors
from cormorant_worker.logs import FIELDS, LogContext, configure_logs, quiet_by_default


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_every_log_line_has_the_same_five_fields() -> None:
    out, context = io.StringIO(), LogContext(job="pong", epoch=2)
    configure_logs(context, stream=out)
    log = structlog.get_logger()
    log.info("head_ready", url="http://x")
    context.version = 7
    log.warning("worker_lost", worker="gpu-pool-3", reason="gone")
    log.info("weights_published", version=8)
    try:
        int("no\nsuch thing")
    except ValueError:
        log.exception("failed")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [list(line)[:8] for line in lines] == [["timestamp", "level", "event", *FIELDS]] * 4
    assert [[line[name] for name in FIELDS] for line in lines] == [
        ["pong", "", "", 2, None],
        ["pong", "gpu-pool", "gpu-pool-3", 2, 7],
        ["pong", "", "", 2, 8],
        ["pong", "", "", 2, 7],
    ]
    assert lines[0]["url"] == "http://x"
    assert lines[1]["level"] == "warning"
    assert "ValueError: invalid literal" in lines[3]["exception"]


def test_a_terminal_gets_lines_for_people_without_what_is_empty() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]  # a terminal
    configure_logs(LogContext(job="pong"), stream=out)
    structlog.get_logger().warning("worker_lost", worker="cpu-0")
    text = out.getvalue()
    assert "worker_lost" in text
    assert "pong" in text
    assert "version" not in text
    assert not text.startswith("{")


def test_a_script_sees_warnings_alone_unless_it_configured_logs(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    quiet_by_default()
    structlog.get_logger().info("worker_ready")
    structlog.get_logger().warning("worker_lost")
    said = capsys.readouterr()
    assert said.out == ""
    assert "worker_lost" in said.err
    assert "worker_ready" not in said.err

    out = io.StringIO()
    configure_logs(LogContext(), stream=out)
    quiet_by_default()
    structlog.get_logger().info("worker_ready")
    assert "worker_ready" in out.getvalue()


ERRORS = [found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__]
REFUSALS = {"ManifestError", "DeviceUnavailable", "UnknownEnv", "InvalidAction", "PolicyMismatch"}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_runtime_errors_and_refusals_value_errors(error: type[Exception]) -> None:
    """Scripts that were written for TorchRL and Tianshou catch them."""
    assert issubclass(error, RuntimeError)
    assert issubclass(error, ValueError) == (error.__name__ in REFUSALS)
