"""Async tests of the operator run on asyncio, by anyio's plugin: `pytestmark = pytest.mark.anyio`."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
