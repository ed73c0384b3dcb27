"""What tests need and a machine may lack: a cluster, Helm, a browser.

A test without it is skipped, and fails where `CORMORANT_REQUIRE` names it (`cluster,helm`): a CI job that starts a
cluster and loses it must not be green with every test skipped.
"""

import os
from typing import Literal, NoReturn, get_args

import pytest

VARIABLE = "CORMORANT_REQUIRE"
Need = Literal["cluster", "helm", "nodes", "images", "kueue", "podgroups", "prometheus", "chromium"]


def required() -> frozenset[str]:
    """What this machine claims to have."""
    names = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := sorted(names - set(get_args(Need))):
        raise pytest.UsageError(f"{VARIABLE} names {', '.join(unknown)}; it may name {', '.join(get_args(Need))}")
    return names


def lacks(need: Need, why: str) -> NoReturn:
    """Skip the test, or fail it where the machine claims to have what is missing."""
    if need in required():
        pytest.fail(f"{VARIABLE} names {need}, but: {why}")
    pytest.skip(why)
