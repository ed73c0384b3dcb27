"""`env.openenv`: environments behind an OpenEnv server, one WebSocket session per row.

All sessions of a worker are stepped at once: their actions are sent first, then their answers are awaited. A session
whose server dies, fails or does not answer crashes alone, as an environment in a subprocess does, and is opened again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import gymnasium
import numpy as np
import structlog

from cormorant_contract.env import OpenEnvAction, OpenEnvArray, OpenEnvEnv
from cormorant_worker.envs.env_row import BadObservation
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.protocol import Rows, VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import Space, cast_exactly

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

log = structlog.get_logger()

SIDECAR = "CORMORANT_OPENENV_URL"
"""Set by the operator where it starts the image beside the worker."""
_PAUSE_S = 0.5
_OPEN_S = 10.0
_SCHEMA_BYTES = 8 << 20
_MESSAGE_BYTES = 64 << 20

_COMMON = ("done", "reward", "metadata")
"""Fields that every observation has, and are no part of it here; an action has the last one."""
_AT_END = "truncated"
"""Field of an observation or its metadata that tells a truncation from a termination, both of which OpenEnv calls
done."""


class OpenEnvFailed(Exception):
    """The server answered with an error, or not at all."""


def _lost() -> tuple[type[Exception], ...]:
    """Exceptions that an absent or full server raises. Imports websockets, which only sessions need."""
    from websockets.exceptions import WebSocketException

    return (OSError, WebSocketException, OpenEnvFailed)


@dataclass(frozen=True, slots=True)
class _Part:
    """One field of an observation or an action."""

    name: str
    space: Space
    words: tuple[Any, ...] = ()
    """Values that the numbers of a Discrete space stand for; empty: the numbers themselves."""

    def observed(self, value: Any) -> Any:
        """The value of a message in this space. One that does not fit is refused by who writes it."""
        return self.words.index(value) if self.words else cast_exactly(np.asarray(value), np.dtype(self.space.dtype))

    def acted(self, value: Any) -> Any:
        """The action for a message."""
        return self.words[int(value)] if self.words else np.asarray(value).tolist()


class OpenEnvSource(EnvSource):
    """Builds one `OpenEnvSession` per row. Raises EnvBuildError without a server, or if messages are no arrays."""

    def __init__(self, block: OpenEnvEnv, max_episode_steps: int = 0) -> None:
        self.block, self.max_episode_steps = block, max_episode_steps
        self.url = (block.url or os.environ.get(SIDECAR, "")).rstrip("/")
        if not self.url:
            raise EnvBuildError(
                f"spec.env.openenv.image is {block.image}, which the operator starts in the workers' pods; on this "
                "machine start the server yourself, and write its address in url"
            )
        try:
            schema = self.until(self._ask_for_schema, "no answer")
            self.observation = _parts(schema["observation"], "observation", block.fields.observation)
            self.action = _parts(schema["action"], "action", block.fields.action)
        except (LookupError, ValueError, TypeError, AttributeError, HTTPException) as error:
            raise EnvBuildError(
                f"what answers at {self.url}/schema is not an OpenEnv server ({type(error).__name__}: {error}); write "
                "the address of one in spec.env.openenv.url"
            ) from error

    @property
    def name(self) -> str:
        return self.block.name

    def build(self, row: int) -> gymnasium.Env[Any, Any]:
        session: gymnasium.Env[Any, Any] = OpenEnvSession(self)
        limit = self.max_episode_steps
        return gymnasium.wrappers.TimeLimit(session, limit) if limit else session

    def until(self, attempt: Callable[[], Any], what: str) -> Any:
        """Try again until it works, for `startTimeoutSeconds`."""
        limit_s, said = self.block.start_timeout_seconds, ""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return attempt()
            except _lost() as error:
                words = str(error) or type(error).__name__
                if time.monotonic() + _PAUSE_S > deadline:
                    raise EnvBuildError(
                        f"{what} of the OpenEnv server at {self.url} within {limit_s} s (startTimeoutSeconds): {words}"
                    ) from error
                if words != said:
                    log.info("openenv_waits", url=self.url, reason=f"{what}: {words}")
                    said = words
            time.sleep(_PAUSE_S)

    def _ask_for_schema(self) -> Any:
        with urlopen(f"{self.url}/schema", timeout=_OPEN_S) as response:
            return json.loads(response.read(_SCHEMA_BYTES))


class OpenEnvSession(gymnasium.Env[Any, Any]):
    """One session of a server. A reward that is null counts as 0."""

    def __init__(self, source: OpenEnvSource) -> None:
        self._source = source
        self.observation_space = _space_of(source.observation)
        self.action_space = _space_of(source.action)
        self._stack = ExitStack()
        self._connection: ClientConnection | None = None
        self._is_sent = False
        self._until = 0.0
        """When the answer that is awaited is late."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the first time, wait for the server and for a free session of it."""
        data = {**self._source.block.kwargs, **({} if seed is None else {"seed": seed}), **(options or {})}
        if self._connection is None:
            answer = self._source.until(lambda: self._open(data), "no session")
        else:
            self._send("reset", data)
            answer = self._receive()
        return self._read(answer), dict(answer["observation"])

    def send(self, action: Any) -> None:
        """Begin a step. `step` completes it."""
        parts = self._source.action
        values = [action] if len(parts) == 1 else [action[part.name] for part in parts]
        data = {part.name: part.acted(value) for part, value in zip(parts, values, strict=True)}
        self._is_sent = True
        self._send("step", data)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Complete the step that `send` began, or do all of it."""
        if not self._is_sent:
            self.send(action)
        self._is_sent = False
        answer = self._receive()
        observation = answer["observation"]
        metadata = observation.get("metadata") or {}
        is_cut = bool(observation.get(_AT_END) or metadata.get(_AT_END))
        is_done = bool(answer.get("done"))
        reward = float(answer.get("reward") or 0.0)
        return self._read(answer), reward, is_done and not is_cut, is_done and is_cut, dict(observation)

    def close(self) -> None:
        self._connection = None
        self._stack.close()

    def _open(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.sync.client import connect

        # A server without a free session accepts the connection, and answers with an error.
        url = f"ws{self._source.url.removeprefix('http')}/ws"
        opening = connect(url, open_timeout=_OPEN_S, max_size=_MESSAGE_BYTES, compression=None, close_timeout=1)
        self._connection = self._stack.enter_context(opening)
        try:
            with suppress(*_lost()):  # it has closed already, and its reason lies ready
                self._send("reset", data)
            return self._receive()
        except BaseException:
            self.close()
            raise

    def _send(self, kind: str, data: Mapping[str, Any]) -> None:
        assert self._connection is not None
        self._until = time.monotonic() + self._source.block.step_timeout_seconds
        self._connection.send(json.dumps({"type": kind, "data": data}))

    def _receive(self) -> Mapping[str, Any]:
        assert self._connection is not None
        try:
            text = self._connection.recv(timeout=max(0.0, self._until - time.monotonic()))
            message = json.loads(text)
        except TimeoutError:
            limit_s = self._source.block.step_timeout_seconds
            raise OpenEnvFailed(f"the server gave no answer within {limit_s} s (stepTimeoutSeconds)") from None
        except ValueError:
            message = None
        data = (message.get("data") or {}) if isinstance(message, Mapping) else None
        if not isinstance(data, Mapping):
            raise OpenEnvFailed(f"the server sent {text[:100]!r}, which is not an OpenEnv message; correct the server")
        if message.get("type") == "observation" and isinstance(data.get("observation"), Mapping):
            return data
        if data.get("code") == "CAPACITY_REACHED":
            raise OpenEnvFailed(
                f"all {data.get('max_sessions')} sessions of the server are in use; raise its max_concurrent_envs, or "
                "lower numEnvs"
            )
        raise OpenEnvFailed(f"the server answered {data.get('code') or message.get('type')}: {data.get('message')}")

    def _read(self, answer: Mapping[str, Any]) -> Any:
        observation, parts = answer["observation"], self._source.observation
        values = {}
        for part in parts:
            try:
                values[part.name] = part.observed(observation[part.name])
            except (KeyError, ValueError, TypeError, OverflowError) as error:
                raise BadObservation(
                    f"the OpenEnv server's observation has {part.name} {str(observation.get(part.name))[:100]!r}, "
                    f"which does not fit {part.space} ({type(error).__name__}); correct "
                    "spec.env.openenv.fields.observation"
                ) from error
        return values[parts[0].name] if len(parts) == 1 else values


class OpenEnvs(InlineVectorEnv):
    """Sessions that step at the same time."""

    def _step(self, rows: slice | Rows) -> None:
        for row in self._numbers[rows].tolist():
            running = self._running[row]
            try:
                running.env.unwrapped.send(running.read_action())  # type: ignore[attr-defined]  # an OpenEnvSession
            except _lost() as error:
                self._fail(row, error)
        super()._step(np.asarray([row for row in self._numbers[rows] if row in self._running], dtype=np.int64))


def _space_of(parts: Sequence[_Part]) -> Space:
    return parts[0].space if len(parts) == 1 else gymnasium.spaces.Dict({part.name: part.space for part in parts})


def _parts(schema: Mapping[str, Any], kind: str, given: Sequence[OpenEnvArray]) -> tuple[_Part, ...]:
    """Fields of an observation or an action: those that the manifest has, else those of the server's schema."""
    if given:
        return tuple(_declared(field) for field in given)
    known = schema.get("properties") or {}
    found = [_inferred(name, _resolved(value, schema), kind) for name, value in known.items() if name not in _COMMON]
    if not (parts := tuple(part for part in found if part is not None)):
        raise EnvBuildError(
            f"the server's {kind} has no numbers ({', '.join(sorted(known)) or 'it has no fields'}); declare what is "
            f"to be an array in spec.env.openenv.fields.{kind}"
        )
    return parts


def _declared(field: OpenEnvArray) -> _Part:
    if isinstance(field, OpenEnvAction) and field.values is not None:
        return _Part(field.name, gymnasium.spaces.Discrete(len(field.values)), tuple(field.values))
    dtype = np.dtype(field.dtype)
    if isinstance(field, OpenEnvAction) and dtype.kind in "iu" and not field.shape and field.high is not None:
        low = int(field.low or 0)
        return _Part(field.name, gymnasium.spaces.Discrete(int(field.high) - low + 1, start=low))
    least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
    bounds = (least if field.low is None else field.low), (most if field.high is None else field.high)
    return _Part(field.name, gymnasium.spaces.Box(*bounds, field.shape, dtype.type))


def _resolved(field: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field's schema without a reference, and of "this or null" the first."""
    for option in (*field.get("anyOf", ()), *field.get("allOf", ())):
        if option.get("type") != "null":
            return _resolved({**field, "anyOf": (), "allOf": (), **option}, schema)
    if isinstance(reference := field.get("$ref"), str):
        found: Mapping[str, Any] = schema.get("$defs", {}).get(reference.rpartition("/")[2], {})
        return found
    return field


def _inferred(name: str, field: Mapping[str, Any], kind: str) -> _Part | None:
    """A field of the server's schema as an array; None: it is text, or something nested, of an observation."""
    low, high, type_ = field.get("minimum"), field.get("maximum"), field.get("type")
    if words := tuple(field.get("enum") or ((False, True) if type_ == "boolean" else ())):
        return _Part(name, gymnasium.spaces.Discrete(len(words)), words)
    dtype = {"integer": "int64", "number": "float32"}.get(str(type_), "")
    if dtype and kind == "observation":
        return _declared(OpenEnvArray.model_construct(name=name, dtype=dtype))
    if dtype and low is not None and high is not None:
        return _declared(OpenEnvAction.model_construct(name=name, dtype=dtype, low=low, high=high))
    if kind == "action" or (type_ == "array" and "string" not in json.dumps(field.get("items", "string"))):
        raise EnvBuildError(
            f"the server's schema does not say what the {kind}'s {name} may be ({type_ or 'no type'}); declare its "
            f"shape and range, or its values, in spec.env.openenv.fields.{kind}"
        )
    return None


def open_envs(request: EnvRequest) -> OpenedEnvs:
    """All sessions in one group."""
    return OpenedEnvs((_open(request),))


def open_episodes(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
    """One session for each episode."""
    return _open(request, wrap)


def _open(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource] = lambda source: source) -> VectorEnv:
    block = request.env.openenv
    assert block is not None
    source = wrap(OpenEnvSource(block, request.env.max_episode_steps))
    return OpenEnvs(source, seeds=request.seeds, limits=request.limits, info=request.info)
