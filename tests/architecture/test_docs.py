"""What the documentation names exists: tests on the pages about failures, files and names on `find-your-way.md`."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("page", ["explanation/failures.md", "reference/pods.md"])
PAGE = ROOT / "docs" / "explanation" / "find-your-way.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


@BOTH
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = re.findall(r"`(test_\w+)`", read(page))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in written] == []


def tables(text: str, heading: str) -> list[list[str]]:
    """The tables whose first row is `heading`, as lists of rows."""
    found = re.findall(rf"^\| {re.escape(heading)} \|$\n\| --- .*\n((?:\| .*\n)+)", text, re.MULTILINE)
    return [table.splitlines() for table in found]


def test_every_row_of_the_pods_page_names_a_test() -> None:
    (rows,) = tables(read("reference/pods.md"), "event | what happens | test")
    assert len(rows) > 5
    assert [row for row in rows if "`test_" not in row] == []


def test_every_failure_names_a_test() -> None:
    text = read("explanation/failures.md")
    events = [row.split(" | ")[0] for rows in tables(text, "event | what happens") for row in rows]
    tested = [row.split(" | ")[0] for rows in tables(text, "event | tests") for row in rows if "`test_" in row]
    assert len(events) > 80
    assert [event for event in events if tested.count(event) != 1] == []


def names_in(path: Path) -> set[str]:
    """Names of a module, and of its classes' members as `Class.member`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{member.name}" for member in members}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_there_are_ten_answers_or_more() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=[row.split(" |")[0].removeprefix("| ") for row in ROWS])
def test_every_file_and_name_exists(row: str) -> None:
    words = re.findall(r"`([^`]+)`", row)
    files = [ROOT / word for word in words if "/" in word]
    assert [str(path) for path in files if not path.exists()] == []
    known = {name for path in files if path.suffix == ".py" for name in names_in(path)}
    names = [word for word in words if "/" not in word and " " not in word]
    assert names
    assert [name for name in names if name not in known] == []
