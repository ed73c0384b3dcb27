"""Collecting from a server of the real `openenv` package, in a process of its own: `make test-openenv` installs it."""

import http.server
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets.sync.server
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from cormorant import open_fleet
from cormorant_contract.env import Env
from cormorant_testing.scripts import unused_port
from cormorant_worker.envs.kinds import kind_of
from cormorant_worker.envs.openenv import OpenEnvSource
from cormorant_worker.envs.protocol import EVERY_ROW, VectorEnv
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.errors import EnvBuildError, EnvCrashed

PYTHON = os.environ.get("CORMORANT_OPENENV", "")
SERVER = Path(__file__).parents[3] / "support" / "cormorant_testing" / "openenv_server.py"
FIELDS = {
    "observation": [
        {"name": "total", "dtype": "int64"},
        {"name": "seed", "dtype": "int64"},
        {"name": "board", "dtype": "int64", "shape": [2, 2]},
    ],
}
needs_openenv = pytest.mark.skipif(not PYTHON, reason="CORMORANT_OPENENV is not set: see `make test-openenv`")


class Server:
    def __init__(self, sessions: int) -> None:
        port = unused_port()
        self.url, self._command = f"http://127.0.0.1:{port}", [PYTHON, str(SERVER), str(port), str(sessions)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def start(sessions: int = 8) -> Server:
            stack.callback((server := Server(sessions)).kill)
            return server

        yield start


def openenv(url: str, **fields: Any) -> Env:
    return Env.model_validate({"openenv": {"url": url, "startTimeoutSeconds": 120} | fields})


def opened(env: Env) -> VectorEnv:
    request = EnvRequest(env=env, seeds_of=lambda count: range(10, 10 + count), limits=RestartLimits(total=100))
    (group,) = kind_of(env).open_envs(request).groups
    return group


@needs_openenv
def test_frames_are_those_of_a_plain_loop(serve: Callable[..., Server]) -> None:
    with closing(opened(openenv(serve().url, numEnvs=3, fields=FIELDS, kwargs={"length": 4}))) as env:
        board, seed, total = env.start()  # by name: board, seed, total
        assert seed.tolist() == [10, 11, 12]
        assert total.tolist() == [0, 0, 0]
        assert board.tolist() == [[[0, 0], [1, 0]]] * 3
        expected, episode, steps = np.zeros(3, dtype=np.int64), 1, 0
        generator = np.random.default_rng(0)
        for _ in range(12):
            action = generator.integers(0, 3, 3)
            env.send((action,), EVERY_ROW)
            step = env.recv()
            expected, steps = expected + action - 1, steps + 1
            assert step.reward.tolist() == expected.tolist()
            is_end = steps == 4
            assert (step.terminated | step.truncated).tolist() == [is_end] * 3
            if is_end:
                assert step.truncated.tolist() == [episode % 2 == 0] * 3
                assert step.final[2].tolist() == expected.tolist()
                expected, steps, episode = np.zeros(3, dtype=np.int64), 0, episode + 1
            assert step.obs[2].tolist() == expected.tolist()
            assert step.obs[0].tolist() == [[[steps, total], [episode, 0]] for total in expected.tolist()]


@needs_openenv
def test_a_server_that_dies_cuts_its_episodes_and_is_waited_for(serve: Callable[..., Server]) -> None:
    server = serve()
    with closing(opened(openenv(server.url, numEnvs=2, fields=FIELDS))) as env:
        env.start()
        right = (np.full(2, 2),)
        env.send(right, EVERY_ROW)
        assert env.recv().fresh.size == 0
        server.kill()
        server.start()
        env.send(right, EVERY_ROW)
        step = env.recv()
        assert step.fresh.tolist() == [0, 1]
        assert step.obs[2].tolist() == [0, 0]
        assert env.restarts >= 2
        env.send(right, EVERY_ROW)
        assert env.recv().reward.tolist() == [1.0, 1.0]


@needs_openenv
def test_a_full_server_is_waited_for(serve: Callable[..., Server]) -> None:
    server = serve(sessions=1)
    first = opened(openenv(server.url, fields=FIELDS))
    second = opened(openenv(server.url, fields=FIELDS, startTimeoutSeconds=1))
    try:
        first.start()
        with pytest.raises(
            EnvBuildError, match=r"within 1 s .*: all 1 sessions of the server are in use; raise its max_"
        ):
            second.start()
        first.close()
        second.start()
    finally:
        first.close()
        second.close()


@needs_openenv
def test_a_fleet_collects_by_the_schema_alone(serve: Callable[..., Server]) -> None:
    fields = {"observation": [{"name": "total", "dtype": "int64"}]}
    block = {"url": serve().url, "numEnvs": 2, "fields": fields, "startTimeoutSeconds": 120}
    with open_fleet(env={"openenv": block}, workers=2, frames_per_batch=20) as fleet:
        batch = fleet.next_batch(timeout=60)
    assert batch.shape == (2, 10)
    after, reward = batch["next", "observation"], batch["next", "reward"].squeeze(-1)
    assert after.squeeze(-1).tolist() == reward.long().tolist()
    assert batch["next", "done"].squeeze(-1)[:, 4::5].all()


def test_an_image_needs_the_operator() -> None:
    env = Env.model_validate({"openenv": {"image": "grid:1"}})
    with pytest.raises(EnvBuildError, match="image is grid:1, which the operator starts in the workers' pods"):
        opened(env)


def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(EnvBuildError, match=r"no answer of the OpenEnv server at http://127.0.0.1:1 within 1 s"):
        opened(openenv("http://127.0.0.1:1", startTimeoutSeconds=1))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(EnvBuildError, match=r"no answer of the OpenEnv server .* within 1 s .*: HTTP Error 404"):
            opened(openenv(f"http://127.0.0.1:{other.server_address[1]}", startTimeoutSeconds=1))
        other.shutdown()


@contextmanager
def scripted(answer: Callable[[int], Any], schema: bytes = b"") -> Iterator[str]:
    """A server that has a schema, and answers each message of a session as `answer` says of its number. Its address."""
    fields = {"n": {"type": "integer"}}
    action = {"column": {"type": "integer", "minimum": 1, "maximum": 3}}
    body = schema or json.dumps({"action": {"properties": action}, "observation": {"properties": fields}}).encode()

    def serve_schema(connection: ServerConnection, request: Request) -> Response | None:
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(200, "OK", headers, body) if request.path == "/schema" else None

    def play(connection: ServerConnection) -> None:
        for number, _ in enumerate(connection):
            if (message := answer(number)) is not None:
                connection.send(message if isinstance(message, str) else json.dumps(message))

    with websockets.sync.server.serve(play, "127.0.0.1", 0, process_request=serve_schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def seen(**observation: Any) -> Any:
    return {"type": "observation", "data": {"observation": observation, "reward": 1.0, "done": False}}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (seen(n=0.7), r"has n '0.7', which does not fit Box\(0, 255"),
        (seen(m=1), "has n 'None', which does not fit"),
        ("hello", "within 1 s .*: the server sent 'hello', which is not an OpenEnv message; correct the server"),
        (None, r"within 1 s .*: the server gave no answer within 1 s \(stepTimeoutSeconds\)"),
    ],
)
def test_what_a_server_may_not_send_is_refused(answer: Any, words: str) -> None:
    fields = {"observation": [{"name": "n", "dtype": "uint8"}]}
    with (
        scripted(lambda number: answer) as url,
        closing(opened(openenv(url, fields=fields, startTimeoutSeconds=1, stepTimeoutSeconds=1))) as env,
        pytest.raises((EnvBuildError, EnvCrashed), match=words),
    ):
        env.start()


@pytest.mark.parametrize("schema", [b"\xff\xfe", b"[1]", b'{"action": {}, "observation": {"properties": 3}}'])
def test_a_schema_that_is_none_is_refused(schema: bytes) -> None:
    sentence = r"/schema is not an OpenEnv server .*; write the address of one"
    with scripted(lambda number: None, schema) as url, pytest.raises(EnvBuildError, match=sentence):
        opened(openenv(url))


def test_actions_follow_the_schema() -> None:
    action = {
        "properties": {
            "metadata": {"type": "object"},
            "column": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 7}, {"type": "null"}]},
            "side": {"$ref": "#/$defs/Side"},
            "force": {"type": "number", "minimum": -1, "maximum": 1},
            "hold": {"type": "boolean"},
        },
        "$defs": {"Side": {"enum": ["UP", "DOWN"], "type": "string"}},
    }
    observation = {"properties": {"x": {"type": "number"}, "n": {"type": "integer"}, "text": {"type": "string"}}}

    def read() -> OpenEnvSource:
        schema = json.dumps({"action": action, "observation": observation}).encode()
        with scripted(lambda number: None, schema) as url:
            return OpenEnvSource(openenv(url).openenv)  # type: ignore[arg-type]  # it is set

    source = read()
    spaces = {part.name: str(part.space) for part in (*source.action, *source.observation)}
    assert spaces == {
        "column": "Discrete(7, start=1)",
        "side": "Discrete(2)",
        "force": "Box(-1.0, 1.0, (), float32)",
        "hold": "Discrete(2)",
        "x": "Box(-inf, inf, (), float32)",
        "n": f"Box({-(2**63)}, {2**63 - 1}, (), int64)",
    }
    acted = [part.acted(value) for part, value in zip(source.action, (3, 1, np.float32(0.5), 1), strict=True)]
    assert acted == [3, "DOWN", 0.5, True]
    action["properties"]["column"] = {"type": "integer"}
    with pytest.raises(EnvBuildError, match="does not say what the action's column may be \\(integer\\)"):
        read()
    observation["properties"]["board"] = {"type": "array", "items": {"type": "integer"}}
    with pytest.raises(EnvBuildError, match="does not say what the observation's board may be \\(array\\)"):
        read()
