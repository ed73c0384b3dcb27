"""Findings are shown as they come, since a run takes hours. At its end: what happened, and how often."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if (path := os.environ.get("CORMORANT_CHAOS_LOG")) and report.when == "call":
        with open(path, "a") as file:  # noqa: PTH123  # appended to by several processes
            file.write(f"{item.name} {report.outcome} {report.duration:.0f} s {told(report)}\n")
            if report.failed:
                file.write(f"{report.longreprtext}\n{report.capstdout}\n")
    return report


def told(report: pytest.TestReport) -> str:
    """What a schedule was, and what happened in it."""
    for plan, done, judge in chaos_of(report):
        happened = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
        return f"{plan.door} on {plan.engine}, {plan.theme}, {judge.frames} frames: {happened}"
    return ""


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
