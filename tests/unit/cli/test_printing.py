"""The table of `cormorant evaluate`."""

from cormorant_cli.commands.evaluate import show_table


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
