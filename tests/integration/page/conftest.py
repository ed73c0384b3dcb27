"""One browser for all tests of a module, and one head over a real CartPole."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from cormorant_testing.browser import chromium
from cormorant_testing.heads import HeadProcess, write_manifest
from cormorant_testing.serving import Api


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadProcess]:
    folder = tmp_path_factory.mktemp("cartpole")
    manifest = write_manifest(folder, "CartPole-v1", totalFrames=10**12)  # far from its end
    with HeadProcess(manifest, folder / "head", "--workers", "2") as head:
        head.api()
        yield head


@pytest.fixture(scope="module")
def writer(cartpole: HeadProcess) -> Api:
    return cartpole.api("write")
