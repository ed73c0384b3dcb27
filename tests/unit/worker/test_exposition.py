"""What is scraped: escaped, monotone, and nothing that was not declared."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cormorant_contract.metrics import head as declared
from cormorant_worker.metrics.exposition import Exposition, Rising, observe_all

NASTY = 'a "quoted" \\ name\nof two lines'


def samples(exposition: Exposition) -> dict[tuple[str, str], float]:
    text = exposition.text()[0].decode()
    return {
        (sample.name, sample.labels["collectorjob"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_labels_with_quotes_and_newlines_come_through() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob=NASTY)
    exposition.counter(declared.FRAMES, env=NASTY).inc(3)
    assert samples(exposition) == {("cormorant_frames_total", NASTY): 3}
    assert len(exposition.text()[0].splitlines()) == 2 * len(declared.HEAD_METRICS) + 1, "a newline in a label"


def test_a_counter_follows_a_number_and_never_goes_back() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob="pong")
    rising = exposition.rising(declared.FRAMES, floor=100, env="Pong-v5")
    found = []
    for number in (50, 120, 90, 121):
        rising.follow(number)
        found.append(samples(exposition)["cormorant_frames_total", "pong"])
    assert found == [100, 120, 120, 121]


def test_many_values_are_observed_as_one_by_one() -> None:
    many, single = (Exposition(declared.HEAD_METRICS, collectorjob="pong") for _ in range(2))
    values = [-2000.0, -1000.0, -999.5, 0.0, 7.0, 7.0, 1e9, math.inf]
    for metric in (declared.EPISODE_RETURN, declared.BATCH):
        labels = {name: "x" for name in metric.label_names if name != "collectorjob"}
        observe_all(many.histogram(metric, **labels), values)
        for value in values:
            single.histogram(metric, **labels).observe(value)
    assert many.text()[0].decode() == single.text()[0].decode()


def test_a_label_that_was_not_declared_is_refused() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob="pong")
    with pytest.raises(KeyError):
        exposition.gauge(declared.WORKERS, group="cpu")


def test_counters_have_no_series_of_when_they_began() -> None:
    exposition = Exposition(declared.HEAD_METRICS, collectorjob="pong")
    Rising(exposition.counter(declared.REDELIVERED)).follow(1)
    assert b"_created" not in exposition.text("application/openmetrics-text; version=1.0.0")[0]
