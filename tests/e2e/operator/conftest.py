"""A namespace of a real API server with an operator, for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_testing.kubectl import Kubelet, Namespace, require_crd
from cormorant_testing.operator_scene import Scene
from cormorant_testing.stub_heads import StubHeads

RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


@pytest.fixture(scope="module")
def cluster() -> None:
    require_crd()


@pytest.fixture
def scene(cluster: None, tmp_path: Path) -> Iterator[Scene]:
    with StubHeads() as heads, Namespace("operator", RESTRICTED) as namespace:
        yield Scene(namespace, heads, tmp_path)


@pytest.fixture
def running(scene: Scene) -> Iterator[Scene]:
    """A job of two workers, all ready."""
    with scene.operator(), Kubelet(scene.namespace):
        scene.submit()
        scene.until_ready()
        yield scene
