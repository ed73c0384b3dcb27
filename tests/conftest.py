"""What holds for all tests."""

import datetime
import gc
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from cormorant_testing import needs

BEGAN = time.monotonic()
# Importing all tests makes a million objects that live to the end. The collector would look at them again and again: a
# third of the time that pytest needs until the first test, and some in each test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what is left at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="Start tests for this long and skip those left; files come in another order each day, so that all run.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--time-budget") is None:
        return
    files = sorted({item.path for item in items})
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    random.Random(day).shuffle(files)
    place = {file: index for index, file in enumerate(files)}
    items.sort(key=lambda item: place[item.path])  # stable: a file's tests keep their order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("--time-budget")
    if seconds is not None and time.monotonic() > BEGAN + seconds:
        pytest.skip(f"not run: the time budget of {seconds:.0f} s was spent")


def pytest_configure() -> None:
    needs.required()  # a name that it does not know is refused before any test runs
    # A shell may start background jobs with Ctrl-C ignored; commands that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray runs its workers with niceness 15: beside other tests they would get next to no processor time.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Hypothesis fails examples that take longer than 200 ms, as any may on a busy machine.
    settings.register_profile("cormorant", deadline=None)
    settings.load_profile("cormorant")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, by anyio's plugin: `pytestmark = pytest.mark.anyio`."""
    return "asyncio"


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this machine, which outlives the fleets on it."""
    import ray

    from cormorant_worker.fleet.options import RayOptions
    from cormorant_worker.fleet.ray.cluster import RayCluster

    cluster = RayCluster(RayOptions(init={"object_store_memory": 200 << 20}))
    assert ray.is_initialized()
    yield
    cluster.close()
    assert not ray.is_initialized()
