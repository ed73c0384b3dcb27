"""An API server that answers as it is told, and a kubeconfig that leads there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.api_proxy import write_kubeconfig
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead

ApiServer = Callable[[Callable[[Heard], Say]], AbstractContextManager[Any]]


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a server the one that commands speak to: context `here`, namespace `rl`, token `t`."""

    def write(server: str) -> None:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server, "t", "rl")))

    return write


@pytest.fixture
def api_server(kubeconfig: Callable[[str], None]) -> ApiServer:
    @contextmanager
    def start(answer: Callable[[Heard], Say]) -> Iterator[Any]:
        with ScriptedHead(answer) as server:
            kubeconfig(server.url)
            yield server

    return start
