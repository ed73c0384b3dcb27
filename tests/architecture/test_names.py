"""One word, one idea: help texts say what a value is, and a public class name exists once unless a reason is listed."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("api", "worker", "operator", "charts", "benchmarks")
REASONS = Path(__file__).with_name("class_names.txt")


def sources(*rooms: str) -> Iterator[tuple[str, str]]:
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_no_help_text_begins_with_of() -> None:
    found = {
        path: re.findall(r"""\bhelp=\(?\s*[rf]?["'](Of\b.*)""", text)
        for path, text in sources(*ROOMS, "docs", "examples", "tests")
    }
    assert {path: texts for path, texts in found.items() if texts} == {}


def homes_of_names() -> dict[str, list[str]]:
    """Public classes that exist more than once in the product, with the files that define them."""
    homes = defaultdict(list)
    for path, text in sources("api", "worker", "operator"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            homes[name].append(path)
    return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}


def test_public_class_names_are_unique_or_have_a_reason() -> None:
    lines = [line.partition(": ") for line in REASONS.read_text().splitlines() if line and not line.startswith("#")]
    reasons = {name: reason for name, _, reason in lines}
    assert [name for name, reason in reasons.items() if len(reason) < 20] == []
    homes = homes_of_names()
    assert {name: paths for name, paths in homes.items() if name not in reasons} == {}
    assert sorted(set(reasons) - set(homes)) == [], f"unique by now; delete their lines from {REASONS.name}"
