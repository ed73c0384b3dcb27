"""Objects as text, and ages as kubectl writes them."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml

from cormorant_cli.cluster import age
from cormorant_cli.commands.submit import show_objects
from manifest_making import collector_job

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = collector_job("pong", {"replicas": 1}, namespace="rl", managedFields=[{"manager": "x"}])


def test_objects_are_printed_without_book_keeping() -> None:
    one = yaml.safe_load(show_objects([JOB], "yaml"))
    assert one["metadata"] == {"name": "pong", "namespace": "rl"}
    many = yaml.safe_load(show_objects([JOB, JOB], "json"))
    assert (many["kind"], len(many["items"])) == ("List", 2)
    assert show_objects([JOB, JOB], "name") == "\n".join(["collectorjob.cormorant.dev/pong"] * 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (7260, "2h1m"), (172_800, "2d")],
)
def test_ages_read_as_kubectls_do(seconds: int, text: str) -> None:
    assert age((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == text
