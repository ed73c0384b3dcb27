"""A namespace of a real API server with an operator of its own: kubelets are played by the test, heads by a stub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_testing.kubectl import RESTRICTED, Kubelet, Namespace, require_crd
from cormorant_testing.operator_scene import Cli, StubHeads

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test below is an e2e test, with time for a busy machine; one on nodes has more."""
    for item in (item for item in items if HERE in item.path.parents):
        item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800 if HERE / "real" in item.path.parents else 420))


@pytest.fixture(scope="module")
def cluster() -> None:
    require_crd()


@pytest.fixture
def scene(cluster: None, tmp_path: Path) -> Iterator[Cli]:
    with StubHeads() as heads, Namespace("e2e", RESTRICTED) as namespace:
        yield Cli(namespace, tmp_path, heads=heads)


@pytest.fixture
def running(scene: Cli) -> Iterator[Cli]:
    """A job of two workers, all ready."""
    with scene.operator(), Kubelet(scene.namespace):
        scene.good("submit", scene.write())
        scene.until_ready()
        yield scene
