"""An API server that answers as it is told, and a kubeconfig that leads there."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.scripted_head import Heard, Say, ScriptedHead

ApiServer = Callable[[Callable[[Heard], Say]], AbstractContextManager[Any]]


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a server the one that commands speak to: context `here`, namespace `rl`, token `t`."""

    def write(server: str) -> None:
        entry = {
            "name": "here",
            "context": {"cluster": "here", "user": "here", "namespace": "rl"},
            "cluster": {"server": server},
            "user": {"token": "t"},
        }
        config = {"current-context": "here", **{kind: [entry] for kind in ("contexts", "clusters", "users")}}
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    return write


@pytest.fixture
def api_server(kubeconfig: Callable[[str], None]) -> ApiServer:
    @contextmanager
    def start(answer: Callable[[Heard], Say]) -> Iterator[Any]:
        with ScriptedHead(answer) as server:
            kubeconfig(server.url)
            yield server

    return start
