"""Errors as `application/problem+json`: our own, the fleet's and FastAPI's."""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from cormorant_api.errors import ApiError, StoreError
from cormorant_contract.rest.headers import PROBLEM_JSON
from cormorant_contract.rest.problems import Problem, ProblemType
from cormorant_worker.errors import (
    ControlTimeout,
    CormorantError,
    FleetClosed,
    LastWorker,
    NonfiniteWeights,
    NoSuchWorker,
    StaleWeights,
    StateError,
    WeightsMismatch,
    WorkerFailed,
)

log = structlog.get_logger()

_LONGEST_DETAIL = 2000
_MOST_ERRORS = 20
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_KIND_OF_STATUS = {
    400: ProblemType.MALFORMED_REQUEST,
    401: ProblemType.UNAUTHENTICATED,
    403: ProblemType.FORBIDDEN,
    404: ProblemType.NOT_FOUND,
    405: ProblemType.METHOD_NOT_ALLOWED,
    406: ProblemType.NOT_ACCEPTABLE,
    408: ProblemType.UPLOAD_STALLED,
    411: ProblemType.LENGTH_REQUIRED,
    413: ProblemType.TOO_LARGE,
    415: ProblemType.UNSUPPORTED_FORMAT,
    422: ProblemType.INVALID_REQUEST,
}
_KIND_OF_ERROR: tuple[tuple[type[CormorantError], ProblemType, dict[str, float]], ...] = (
    (StaleWeights, ProblemType.VERSION_CONFLICT, {}),
    (WeightsMismatch, ProblemType.TENSOR_MISMATCH, {}),
    (NonfiniteWeights, ProblemType.NOT_FINITE, {}),
    (StateError, ProblemType.STATE_MISMATCH, {}),
    (ControlTimeout, ProblemType.CONTROL_TIMEOUT, {}),
    (NoSuchWorker, ProblemType.UNKNOWN_WORKER, {}),
    (LastWorker, ProblemType.LAST_WORKER, {}),
    (WorkerFailed, ProblemType.FLEET_FAILED, {"retry_after_s": 10}),
    (FleetClosed, ProblemType.DRAINING, {"retry_after_s": 10}),
)


class ProblemResponse(Response):
    media_type = PROBLEM_JSON

    def __init__(self, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem_bytes(problem), status_code=problem.status, headers=dict(headers or {}))
        if problem.retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
        if problem.status == HTTPStatus.UNAUTHORIZED:
            self.headers["WWW-Authenticate"] = 'Bearer realm="cormorant"'


def problem_bytes(problem: Problem) -> bytes:
    return json.dumps(problem.document(), ensure_ascii=False).encode("utf-8", "backslashreplace")


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(CormorantError, _on_fleet_error)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(Exception, _on_anything)


def as_api_error(error: CormorantError) -> ApiError:
    for known, kind, members in _KIND_OF_ERROR:
        if isinstance(error, known):
            return ApiError(kind, str(error), **members)
    return ApiError(ProblemType.FLEET_FAILED, str(error), retry_after_s=5)


def make_problem(error: ApiError, path: str) -> Problem:
    return Problem(
        type=error.kind.uri,
        title=error.kind.value.replace("-", " ").capitalize(),
        status=error.status,
        detail=error.detail[:_LONGEST_DETAIL],
        instance=path,
        **error.members,
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Allow": error.members.pop("allow")} if "allow" in error.members else None
    return ProblemResponse(make_problem(error, request.url.path), headers)


async def _on_fleet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CormorantError)
    return await _on_api_error(request, as_api_error(error))


async def _on_store_error(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, ApiError(ProblemType.STORE_FAILED, str(error), retry_after_s=5))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _KIND_OF_STATUS.get(error.status_code, ProblemType.MALFORMED_REQUEST)
    detail, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"no such path: {request.url.path}; /docs lists all paths"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names only the methods of the first route with this path; we have one route per method.
        allowed = headers["Allow"] = ", ".join(_methods_at(request))
        detail = f"{request.method} is not allowed at {request.url.path}; use {allowed}"
    problem = make_problem(ApiError(kind, detail, status=error.status_code), request.url.path)
    return ProblemResponse(problem, headers)


def _methods_at(request: Request) -> list[str]:
    routes = request.app.routes
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = list(error.errors())
    # Malformed JSON is a 400, an invalid value a 422.
    if any(entry.get("type") == "json_invalid" for entry in found):
        reason = next(str(e.get("ctx", {}).get("error", "")) for e in found if e.get("type") == "json_invalid")
        bad = ApiError(ProblemType.MALFORMED_REQUEST, f"the body is not valid JSON: {reason}")
        return ProblemResponse(make_problem(bad, request.url.path))
    errors = [_field_error(entry) for entry in found[:_MOST_ERRORS]]
    detail = "; ".join(f"{e['field']}: {e['message']}" for e in errors)
    bad = ApiError(ProblemType.INVALID_REQUEST, detail, errors=errors)
    return ProblemResponse(make_problem(bad, request.url.path))


def _field_error(entry: Mapping[str, Any]) -> dict[str, str]:
    field = ".".join(str(part) for part in entry.get("loc", ()))
    return {"field": field[:200], "message": str(entry.get("msg", ""))[:500]}


async def _on_anything(request: Request, error: Exception) -> Response:
    # Starlette raises it again afterwards, so that the server logs the traceback.
    log.error("request_failed", method=request.method, path=request.url.path, error=f"{type(error).__name__}: {error}")
    failed = ApiError(ProblemType.INTERNAL, "internal error; see the log of the head")
    return ProblemResponse(make_problem(failed, request.url.path))
