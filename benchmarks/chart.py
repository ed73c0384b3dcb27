"""`python -m benchmarks.chart [--check]`: draws docs/images/speed.svg from the table of docs/explanation/speed.md.

Bars are ratios to the bare loop. The image follows the reader's color scheme and loads nothing.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "speed.md"
IMAGE = ROOT / "docs" / "images" / "speed.svg"

_SHOWN = 10
"""Contenders; the rows after them explain the others."""
_BAR, _GAP, _LEFT, _LONGEST, _TOP = 13, 16, 170, 440, 24
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px } .bold { font-weight: 600 }
.ours { fill: #00796b } .other { fill: #9aa5b1 } .line { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de } .ours { fill: #26a69a } .other { fill: #57606a } .line { stroke: #9aa5b1 }
}
"""


def read_table(page: str) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """The contenders, and for each workload the medians of their ratios: of `1.05 (0.93 to 1.20)`, 1.05."""
    head, _, *rows = re.findall(r"^\| (.*) \|$", page, re.MULTILINE)[: 2 + _SHOWN]
    workloads = head.split(" | ")[1:]
    names, *columns = zip(*(row.replace("**", "").split(" | ") for row in rows), strict=True)
    ratios = [[float(cell.partition(" ")[0]) for cell in column] for column in columns]
    return list(names), list(zip(workloads, ratios, strict=True))


def draw(contenders: list[str], workloads: list[tuple[str, list[float]]]) -> str:
    return "\n".join(_lines(contenders, workloads)) + "\n"


def _lines(contenders: list[str], workloads: list[tuple[str, list[float]]]) -> Iterator[str]:
    group = _BAR * len(contenders) + _GAP + 16
    width, height = _LEFT + _LONGEST + 60, _TOP + group * len(workloads) + 8
    scale = _LONGEST / max(2.0, *(ratio for _, ratios in workloads for ratio in ratios))
    one = round(_LEFT + scale)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="Frames per second over the bare loop">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<text x="{one}" y="14" text-anchor="middle" class="small">1: the bare loop</text>'
    for number, (workload, ratios) in enumerate(workloads):
        top = _TOP + number * group
        yield f'<text x="0" y="{top + 12}" class="bold">{escape(workload)}</text>'
        for place, (name, ratio) in enumerate(zip(contenders, ratios, strict=True)):
            y = top + 18 + place * _BAR
            kind = "ours" if name.startswith("Cormorant") else "other"
            yield f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end" class="small">{escape(name)}</text>'
            yield f'<rect x="{_LEFT}" y="{y}" width="{ratio * scale:.0f}" height="{_BAR - 2}" class="{kind}"/>'
            end = _LEFT + ratio * scale
            at = one if one - 32 < end < one else end  # the dashed line crosses no number
            yield f'<text x="{at + 4:.0f}" y="{y + 10}" class="small">{ratio:.2f}</text>'
    yield f'<line x1="{one}" y1="{_TOP - 4}" x2="{one}" y2="{height}" class="line"/>'
    yield "</svg>"


def main() -> int:
    """Write or compare. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the image is out of date")
    given = parser.parse_args()
    text = draw(*read_table(PAGE.read_text()))
    if not given.check:
        IMAGE.write_text(text)
        return 0
    if IMAGE.read_text() == text:
        return 0
    sys.stderr.write(f"{IMAGE} does not show the table of {PAGE}; run make docs\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
