"""Findings are shown as they come: a run of hours is read while it goes on."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if (path := os.environ.get("CORMORANT_CHAOS_LOG")) and report.when == "call":
        with open(path, "a") as file:  # noqa: PTH123  # appended to by several processes
            file.write(f"{item.name} {report.outcome} {report.duration:.0f} s\n")
            if report.failed:
                file.write(f"{report.longreprtext}\n{report.capstdout}\n")
    return report
