"""A namespace of a real API server with an operator of its own: kubelets are played by the test, heads by a stub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_testing.kubectl import RESTRICTED, Kubelet, Namespace, require_crd
from cormorant_testing.operator_scene import Cli
from cormorant_testing.stub_heads import StubHeads


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
        scene.submit()
        scene.until_ready()
        yield scene
