"""The tables of the migration guides: every argument of a peer, and what became of it here."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs" / "how-to"
STATES = ("same", "renamed", "fixed", "left out", "new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table."""

    section: str
    names: frozenset[str]
    """Words in backticks of the first cell."""
    state: str
    here: str
    tests: tuple[str, ...]
    line: str


def rows_of(guide: str) -> list[Row]:
    """All rows below `## Every argument`, the heads of tables left out."""
    text = (DOCS / f"migrating-from-{guide}.md").read_text().split("\n## Every argument\n")[1].split("\n## ")[0]
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        if not line.startswith("| ") or line.startswith(("| ---", "| argument ", "| method ", "| name ")):
            continue
        name, state, here, tests = (cell.strip() for cell in line.strip()[1:-1].split("|"))
        words = " ".join(re.findall(r"`([^`]+)`", name))
        found.append(
            Row(
                section=section,
                names=frozenset(re.findall(r"\w+", words)),
                state=state,
                here=here,
                tests=tuple(re.findall(r"`(test_\w+)`", tests)),
                line=line,
            )
        )
    return found


def names_in(guide: str, section: str) -> set[str]:
    """Every name that the rows of a section have."""
    found = {name for row in rows_of(guide) if row.section.startswith(section) for name in row.names}
    assert found, f"docs/migrating-from-{guide}.md has no rows in a section {section}"
    return found
