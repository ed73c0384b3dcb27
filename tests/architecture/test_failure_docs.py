"""`docs/failures.md` names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_failure_table_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failures.md").read_text())
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in written] == []


def test_every_row_of_the_failure_table_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")]
    assert [row for row in rows[2:] if "`test_" not in row] == []
