"""Requested sizes of worker groups, carried out one after the other."""

from types import SimpleNamespace
from typing import Any

from cormorant_api.control.group_sizes import GroupSizes
from cormorant_testing.scripts import until


def test_a_resize_that_fails_is_over_whatever_the_error_was() -> None:
    def resize(_: object) -> None:
        raise RuntimeError("out of threads")

    stats = SimpleNamespace(groups={"cpu": SimpleNamespace(desired=1)})
    fleet: Any = SimpleNamespace(stats=lambda **_: stats, resize=resize)
    sizes = GroupSizes(fleet)
    sizes.want({"cpu": 2})
    until(lambda: not sizes.describe(paused=False).pending)
    assert sizes.describe(paused=False).error == "RuntimeError: out of threads"
    sizes.close()
