"""The files and names on `docs/explanation/find-your-way.md` exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "find-your-way.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]


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
