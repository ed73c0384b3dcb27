"""Many values at once become the same buckets as one by one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cormorant_contract.metrics.head import EPISODE_RETURN
from cormorant_worker.metrics.spread import Spreads

VALUES = st.lists(st.floats(-2000, 20000) | st.sampled_from(EPISODE_RETURN.buckets), max_size=40)


@given(batches=st.lists(VALUES, max_size=3))
def test_buckets_are_those_of_prometheus_client(batches: list[list[float]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(
        EPISODE_RETURN.name, EPISODE_RETURN.help, EPISODE_RETURN.label_names, buckets=EPISODE_RETURN.buckets,
        registry=theirs,
    ).labels("pong", "Pong-v5")  # fmt: skip
    spreads = Spreads(EPISODE_RETURN)
    ours.register(spreads)
    spread = spreads.child(("pong", "Pong-v5"))
    for batch in batches:
        spread.observe(batch)
        for value in batch:
            histogram.observe(value)
    told = [line for line in generate_latest(ours).splitlines() if line.startswith(b"cormorant")]
    assert told == [line for line in generate_latest(theirs).splitlines() if b"_bucket{" in line]
    assert spread.read()[1] == pytest.approx(math.fsum(value for batch in batches for value in batch))
