"""The operator's process: its command line, its metrics and its log lines."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from cormorant_contract.metrics import BUDGET, BUDGET_PER_JOB_OF_OPERATOR, METRICS
from cormorant_contract.metrics import operator as declared
from cormorant_operator.__main__ import _serve, _work, configure_logs
from cormorant_operator.errors import OperatorError, SettingsError
from cormorant_operator.metrics import Metrics
from cormorant_operator.settings import read_settings
from cormorant_testing.api_proxy import write_kubeconfig


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 40 + b"\n")
    return str(path)


def test_what_is_given_and_the_defaults(key: str) -> None:
    settings = read_settings(["--key-file", key, "--image", "i"])
    assert (settings.key, settings.namespaces, settings.lease) == (b"k" * 40, (), None)
    assert (settings.defaults.image, settings.defaults.poll_s, settings.head_url) == ("i", 15.0, "{scheme}://{ip}:8000")
    assert "kkk" not in repr(settings)
    given = "--namespace a --namespace b --lease ns/op --any-user --architecture amd64 --architecture arm64"
    settings = read_settings(["--key-file", key, "--image", "i", "--network-policies", *given.split()])
    assert (settings.namespaces, settings.lease) == (("a", "b"), ("ns", "op"))
    defaults = settings.defaults
    assert (defaults.has_network_policies, defaults.has_fixed_user) == (True, False)
    assert defaults.architectures == ("amd64", "arm64")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--lease", "nameless"], "--lease nameless: expected NAMESPACE/NAME"),
        (["--key-file", "/nonexistent"], "cannot read --key-file /nonexistent"),
        (["--key-file", "/dev/null"], "--key-file /dev/null holds 0 bytes; a key has at least 32"),
    ],
)
def test_what_cannot_be_used_is_refused(key: str, more: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        read_settings(["--key-file", key, "--image", "i", *more])


def samples(metrics: Metrics) -> list[Any]:
    return [sample for family in text_string_to_metric_families(metrics.text().decode()) for sample in family.samples]


def test_a_thousand_jobs_are_a_few_thousand_series_and_go_with_them() -> None:
    metrics, phase = Metrics(), declared.JOB_PHASE_METRIC
    jobs = {(f'te"a\nm-{i}', "pong"): 1.0 for i in range(1000)}
    metrics.read = lambda: {
        phase: {(*who, "Running"): 1.0 for who in jobs},
        declared.JOB_HEAD_RESTARTS: jobs,
        declared.JOB_WORKER_RESTARTS: jobs,
    }
    found = samples(metrics)
    assert {sample.name for sample in found} <= {name for metric in METRICS["operator"] for name in metric.sample_names}
    assert len(found) <= BUDGET["operator"] + 1000 * BUDGET_PER_JOB_OF_OPERATOR
    jobs = {('te"a\nm-7', "pong"): 1.0}
    labels = {"job_namespace": 'te"a\nm-7', "collectorjob": "pong", "phase": "Running"}
    assert [(found.labels, found.value) for found in samples(metrics) if found.name == phase.name] == [(labels, 1.0)]


def test_log_lines_have_the_fields_of_heads_and_workers(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        configure_logs(level="info")
        structlog.get_logger().debug("workload_not_written")
        with structlog.contextvars.bound_contextvars(job="pong"):
            structlog.get_logger().info("pod_created", pod="pong-cpu-0-abcde")
        structlog.get_logger().info("resynced")
    finally:
        structlog.configure(**before)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(first)[:8] == list(last)[:8] == [
        "timestamp", "level", "event", "job", "group", "worker", "epoch", "version",
    ]  # fmt: skip
    assert (first["job"], first["pod"], last["job"]) == ("pong", "pong-cpu-0-abcde", None)


@pytest.mark.anyio
async def test_operator_that_cannot_ask_for_its_lease_does_not_lead() -> None:
    leader, controller = AsyncMock(), AsyncMock()
    leader.acquire.side_effect = OperatorError("found no credentials")
    settings: Any = SimpleNamespace(namespaces=(), selector="")
    with pytest.raises(OperatorError, match="found no credentials"):
        await _work(controller, leader, settings, asyncio.Event())
    controller.run.assert_not_called()


@pytest.mark.anyio
async def test_unusable_kubeconfig_and_busy_port_are_sentences(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("{")
    monkeypatch.setenv("KUBECONFIG", str(config))
    with socket.create_server(("", 0)) as busy:
        settings = read_settings(["--key-file", key, "--image", "i", "--probe-port", str(busy.getsockname()[1])])
        with pytest.raises(SettingsError, match="cannot use the kubeconfig or the service account: ParserError"):
            await _serve(settings)
        write_kubeconfig(config, "http://127.0.0.1:1")
        with pytest.raises(OperatorError, match=f"cannot listen on --probe-port {settings.probe_port}: "):
            await _serve(settings)
