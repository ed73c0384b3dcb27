"""Random schedules of everything that may happen to a fleet, each from one number. See README.md here.

make chaos                        # 200, from 0 on
make chaos SCHEDULES=1 FIRST=17   # one of them
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from cormorant_testing.chaos.fleet_world import FleetWorld
from cormorant_testing.chaos.head_world import HeadWorld
from cormorant_testing.chaos.plan import plan_of

FIRST = int(os.environ.get("CORMORANT_CHAOS_FIRST", "0"))
SCHEDULES = int(os.environ.get("CORMORANT_CHAOS_SCHEDULES", "6"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # What a killed process leaves open is collected at any moment.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_schedule(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plan = plan_of(seed)
    print(plan)  # noqa: T201  # what pytest shows of a schedule that fails
    print(f"again: make chaos SCHEDULES=1 FIRST={seed}")  # noqa: T201  # as above
    if plan.door == "fleet" and plan.engine == "ray":  # shared by the fleets of this process; heads have their own
        request.getfixturevalue("ray_cluster")
    world = (HeadWorld if plan.door == "head" else FleetWorld)(plan, tmp_path)
    try:
        world.run()
    except BaseException as error:
        with suppress(Exception):
            error.add_note(world.how_it_stands())
        raise
    finally:
        world.clean_up()
