"""One word, one idea: help texts say what a value is, and a public class name exists once unless a reason is listed."""

import re
import subprocess
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


def test_public_class_names_are_unique_or_have_a_reason() -> None:
    lines = [line.partition(": ") for line in REASONS.read_text().splitlines() if line and not line.startswith("#")]
    reasons = {name: reason for name, _, reason in lines}
    assert [name for name, reason in reasons.items() if len(reason) < 20] == []
    found = defaultdict(list)
    for path, text in sources("api", "worker", "operator"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            found[name].append(path)
    homes = {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}
    assert {name: paths for name, paths in homes.items() if name not in reasons} == {}
    assert sorted(set(reasons) - set(homes)) == [], f"unique by now; delete their lines from {REASONS.name}"


BRITISH = (
    "ormalis|ectoris|ummaris|ecognis|nitialis|erialis|ptimis|inimis|aximis|ynchronis|arallelis|tilis[ai]|rganis[ai]|"
    "olour|ehaviour|eighbour|avour|learnt|grey|[^-]labelled|rioritis|andomis|nalyse|centre\\b|artefact|whilst"
)
"""Parts of words that the field's APIs spell otherwise: normalize, vectorize, color, behavior, labeled, center."""


def test_spelling_is_american() -> None:
    command = [
        "git",
        "grep",
        "--perl-regexp",
        "-nIi",
        BRITISH,
        "--",
        ".",
        ":!LICENSE",
        f":!{Path(__file__).relative_to(ROOT)}",
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")  # 1: nothing was found
