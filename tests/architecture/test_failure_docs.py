"""The tests that `docs/explanation/failures.md` and the table of `docs/reference/pods.md` name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("page", ["explanation/failures.md", "reference/pods.md"])


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


@BOTH
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = re.findall(r"`(test_\w+)`", read(page))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in written] == []


@BOTH
def test_every_row_of_the_failure_table_names_a_test(page: str) -> None:
    (table,) = re.findall(r"^\| event \|.*\n\| --- .*\n((?:\| .*\n)+)", read(page), re.MULTILINE)
    rows = table.splitlines()
    assert len(rows) > 5
    assert [row for row in rows if "`test_" not in row] == []
