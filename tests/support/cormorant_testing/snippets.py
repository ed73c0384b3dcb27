"""Fenced blocks of the README and of the documentation, and tables of what became of each name of a peer: those of the
migration guides, and of the page on compatibility.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: str) -> list[tuple[str, str]]:
    """Language and text of each block, in order."""
    return _FENCE.findall((ROOT / page).read_text())


def blocks(page: str, language: str) -> list[str]:
    return [text for found, text in fences(page) if found == language]


class Row(NamedTuple):
    section: str
    names: frozenset[str]
    """Words in backticks of the first cell."""
    state: str
    here: str
    tests: tuple[str, ...]
    """Tests named in the fourth cell, if there is one."""
    line: str


def rows_of(page: str) -> list[Row]:
    """All rows of a page, the heads of tables left out; of a guide, those below `## Every argument`."""
    _, found_it, every = (text := (DOCS / page).read_text()).partition("\n## Every argument\n")
    found, section = [], ""
    for line in (every.split("\n## ")[0] if found_it else text).splitlines():
        if line.startswith(("## ", "### ")):
            section = line.lstrip("# ")
        if not line.startswith("| ") or line.startswith(("| ---", "| argument ", "| method ", "| name ")):
            continue
        name, state, here, *tests = (cell.strip() for cell in line.strip()[1:-1].split("|"))
        words = " ".join(re.findall(r"`([^`]+)`", name))
        named = tuple(re.findall(r"`(test_\w+)`", "".join(tests)))
        found.append(Row(section, frozenset(re.findall(r"\w+", words)), state, here, named, line))
    return found


def names_in(page: str, section: str) -> set[str]:
    """Every name that the rows of a section have."""
    found = {name for row in rows_of(page) if row.section.startswith(section) for name in row.names}
    assert found, f"docs/{page} has no rows in a section {section}"
    return found
