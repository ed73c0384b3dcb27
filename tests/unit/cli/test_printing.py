"""Ages as kubectl writes them, and the table of `cormorant evaluate`."""

from datetime import UTC, datetime, timedelta

import pytest

from cormorant_cli.cluster import age
from cormorant_cli.commands.evaluate import show_table

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (7260, "2h1m"), (172_800, "2d")],
)
def test_ages_read_as_kubectls_do(seconds: int, text: str) -> None:
    assert age((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == text


def test_no_two_columns_of_the_table_have_one_name() -> None:
    spread = {"mean": 1.0, "median": 1.0, "min": 0.0, "max": 2.0, "high": 1.5}
    found = {
        "episodes": 2,
        "return": spread,
        "length": spread,
        "metrics": {"success": spread, "ever": spread, "min": spread},
        "success": {"rate": 0.5, "low": 0.1, "high": 0.9},
    }
    header = show_table([("a", found)]).splitlines()[0].split()
    assert header[5:] == ["MAX", "LENGTH", "SUCCESS", "EVER", "METRICS.MIN", "METRICS.SUCCESS"]
    assert len(set(header)) == len(header)
