"""At the end of a run: what happened, and how often."""

from collections import Counter, defaultdict
from typing import Any

import pytest


def chaos_of(report: pytest.TestReport) -> list[Any]:
    return [value for name, value in report.user_properties if name == "chaos"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome) if r.when == "call"]
    columns: dict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        for plan, done, judge in chaos_of(report):
            column = columns[f"{plan.door}, {plan.engine}"]
            column.update(done)
            column.update({" schedules": 1, " frames judged": judge.frames, " seconds": round(report.duration)})
            column[" with servers"] += bool(plan.servers)
            column[" normalized"] += plan.normalizes
    if not columns:
        return
    terminalreporter.section("what happened")
    heads = sorted(columns)
    terminalreporter.line(f"{'':16}" + "".join(f"{name:>14}" for name in heads))
    for what in sorted({what for column in columns.values() for what in column}):
        terminalreporter.line(f"{what.strip():16}" + "".join(f"{columns[name][what]:14,}" for name in heads))
