"""What is measured and scraped: shares of time of which nothing is lost or counted twice; metrics that are escaped and
monotone; log lines with the same fields on each; classes of errors.
"""

import inspect
import io
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cormorant_contract.metrics import head as declared
from cormorant_contract.metrics.labels import ACTIVITIES, Metric
from cormorant_testing.collecting import make_job
from cormorant_testing.stats import make_stats
from cormorant_worker import errors
from cormorant_worker.collect import timing as times
from cormorant_worker.collect.timing import NUM_TIMING, Timing, spent_ns
from cormorant_worker.fleet.stats import GroupStats
from cormorant_worker.logs import FIELDS, LogContext, configure_logs, quiet_by_default
from cormorant_worker.metrics.exposition import Exposition, observe_all
from cormorant_worker.metrics.fleet import FleetMetrics

VALUES = st.lists(st.floats(-2000, 20000) | st.sampled_from(declared.EPISODE_RETURN.buckets), max_size=40)


def samples(exposition: Exposition) -> dict[tuple[str, str], float]:
    text = exposition.text().decode()
    return {
        (sample.name, sample.labels["collectorjob"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_counter_follows_a_number_and_never_goes_back() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob="pong")
    exposition.show(declared.FRAMES, 100, env="Pong-v5")
    found = []
    for number in (50, 120, 90, 121):
        exposition.show(declared.FRAMES, number, env="Pong-v5")
        found.append(samples(exposition)["cormorant_frames_total", "pong"])
    assert found == [100, 120, 120, 121]


def test_a_group_without_workers_is_not_behind() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob="pong")
    FleetMetrics(make_job(), exposition).sample(make_stats(version=7, groups={"cpu": GroupStats()}))
    assert samples(exposition)["cormorant_policy_version", "pong"] == 7


@given(batches=st.lists(VALUES, max_size=3), metric=st.sampled_from([declared.EPISODE_RETURN, declared.EPISODE_LENGTH]))
def test_many_values_are_observed_as_one_by_one(batches: list[list[float]], metric: Metric) -> None:
    many, single = (Exposition([metric], collectorjob="pong") for _ in range(2))
    told, asked = (exposition.series(metric, env="Pong-v5") for exposition in (many, single))
    for batch in batches:
        observe_all(told, batch)
        for value in batch:
            asked.observe(value)
    # Sums differ by rounding.
    texts = [exposition.text().decode().splitlines() for exposition in (many, single)]
    counts = [[line for line in lines if "_sum{" not in line] for lines in texts]
    assert counts[0] == counts[1]
    assert samples(many).get((f"{metric.name}_sum", "pong")) == pytest.approx(
        samples(single).get((f"{metric.name}_sum", "pong"))
    )


def test_return_that_is_no_number_is_above_every_bound() -> None:
    exposition = Exposition([declared.EPISODE_RETURN], collectorjob="pong")
    observe_all(exposition.series(declared.EPISODE_RETURN, env="x"), [math.nan, math.inf, -math.inf])
    told = [line.rsplit(" ", 1) for line in exposition.text().decode().splitlines() if "_bucket{" in line]
    assert {count for line, count in told if '"+Inf"' not in line} == {"1.0"}
    assert [count for line, count in told if '"+Inf"' in line] == ["3.0"]


def seconds(numbers: np.ndarray, clock: SimpleNamespace) -> dict[str, float]:
    spent = spent_ns(numbers.tolist(), until_ns=clock.ms * 1_000_000)
    return {name: ns / 1e9 for name, ns in zip(ACTIVITIES, spent, strict=True)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of `Timing`, in `ms`."""
    clock = SimpleNamespace(ms=1_000)
    monkeypatch.setattr("cormorant_worker.collect.timing.monotonic_ns", lambda: clock.ms * 1_000_000)
    return clock


def step(timing: Timing, clock: SimpleNamespace, *, env_ms: int, inference_ms: int, rest_ms: int) -> bool:
    """One vector step that takes so long; whether it was measured."""
    laps = timing.next_laps()
    clock.ms += env_ms + inference_ms + rest_ms
    if laps is not None:
        laps.env_ns += env_ms * 1_000_000
        laps.inference_ns += inference_ms * 1_000_000
        timing.measured(laps)
    return laps is not None


def test_one_step_in_sixteen_stands_for_all(clock: SimpleNamespace) -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    timing.begin()
    measured = [step(timing, clock, env_ms=3, inference_ms=1, rest_ms=1) for _ in range(33)]
    timing.rest(times.IDLE)
    assert [i for i, was in enumerate(measured) if was] == [0, 16, 32]
    spent = seconds(numbers, clock)
    assert spent["env"] + spent["inference"] + spent["transfer"] == pytest.approx(0.165)
    assert (spent["env"], spent["inference"]) == pytest.approx((0.099, 0.033))
    found = timing.take()
    assert (found.seconds, found.env_step_s, found.inference_s) == pytest.approx((0.165, 0.003, 0.001))
    assert timing.take().seconds == 0


def test_what_goes_on_is_counted_up_to_now(clock: SimpleNamespace) -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    clock.ms += 10
    assert seconds(numbers, clock)["build"] == pytest.approx(0.01)
    timing.rest(times.IDLE)
    clock.ms += 20
    spent = seconds(numbers, clock)
    assert (spent["build"], spent["idle"]) == pytest.approx((0.01, 0.02))


def test_activities_are_numbered_as_the_contract_names_them() -> None:
    ours = (times.ENV, times.INFERENCE, times.TRANSFER, times.IDLE, times.PAUSED, times.BUILD)
    assert [ACTIVITIES[i] for i in ours] == ["env", "inference", "transfer", "idle", "paused", "build"]


# -- log lines and errors ----------------------------------------------------------------------------------------


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
