"""Errors as `application/problem+json`: our own, the fleet's and FastAPI's."""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from cormorant_api.errors import ApiError, StoreError
from cormorant_contract.rest.base import PROBLEM_JSON
from cormorant_contract.rest.problems import Differences, Problem, ProblemType
from cormorant_worker import errors

log = structlog.get_logger()

_LONGEST_DETAIL = 2000
_MOST_ERRORS = 20
_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_KIND_OF_ERROR: tuple[tuple[type[errors.CormorantError], ProblemType, dict[str, float]], ...] = (
    (errors.StaleWeights, ProblemType.VERSION_CONFLICT, {}),
    (errors.NonfiniteWeights, ProblemType.NOT_FINITE, {}),
    (errors.MalformedWeights, ProblemType.MALFORMED_SAFETENSORS, {}),
    (errors.StateError, ProblemType.STATE_MISMATCH, {}),
    (errors.ControlTimeout, ProblemType.CONTROL_TIMEOUT, {}),
    (errors.NoSuchWorker, ProblemType.UNKNOWN_WORKER, {}),
    (errors.LastWorker, ProblemType.LAST_WORKER, {}),
    (errors.WorkerFailed, ProblemType.FLEET_FAILED, {"retry_after_s": 10}),
    (errors.FleetClosed, ProblemType.DRAINING, {"retry_after_s": 10}),
)


def install(app: FastAPI) -> None:
    for kind in (ApiError, HTTPException, RequestValidationError, errors.CormorantError, StoreError, Exception):
        app.add_exception_handler(kind, _on_error)


def as_api_error(error: errors.CormorantError | StoreError) -> ApiError:
    if isinstance(error, StoreError):
        return ApiError(ProblemType.STORE_FAILED, str(error), retry_after_s=5)
    if isinstance(error, errors.WeightsMismatch):
        lists = {
            what: Differences(count=len(names), names=tuple(name[:200] for name in names[:_MOST_ERRORS]))
            for what, names in error.differences.items()
            if names
        }
        return ApiError(ProblemType.TENSOR_MISMATCH, str(error), **lists)
    for known, kind, members in _KIND_OF_ERROR:
        if isinstance(error, known):
            return ApiError(kind, str(error), **members)
    return ApiError(ProblemType.FLEET_FAILED, str(error), retry_after_s=5)


def answer(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The problem as the response to a request at `path`."""
    problem = Problem(
        type=error.kind.uri,
        title=error.kind.value.replace("-", " ").capitalize(),
        status=error.status,
        detail=error.detail[:_LONGEST_DETAIL],
        instance=path,
        **error.members,
    )
    document = problem.model_dump(mode="json", exclude_none=True)
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace")
    response = Response(body, status_code=error.status, headers=headers, media_type=PROBLEM_JSON)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="cormorant"'
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    path, headers = request.url.path, {}
    match error:
        case ApiError():
            refusal = error
        case errors.CormorantError() | StoreError():
            refusal = as_api_error(error)
        case RequestValidationError():
            invalid = list(error.errors())[:_MOST_ERRORS]
            malformed = [entry["ctx"]["error"] for entry in invalid if entry["type"] == "json_invalid"]
            if malformed:  # a 400; an invalid value is a 422
                refusal = ApiError(ProblemType.MALFORMED_REQUEST, f"the body is not valid JSON: {malformed[0]}")
            else:
                detail = "; ".join(f"{'.'.join(map(str, e['loc']))[:200]}: {e['msg'][:500]}" for e in invalid)
                refusal = ApiError(ProblemType.INVALID_REQUEST, detail)
        case HTTPException(status_code=status):
            detail, headers = str(error.detail), dict(error.headers or {})
            if status == HTTPStatus.NOT_FOUND:
                detail = f"no such path: {path}; /docs lists all paths"
            elif status == HTTPStatus.METHOD_NOT_ALLOWED:
                # Starlette names the methods of the first route at a path; we have one route per method.
                scopes = [{**request.scope, "method": method} for method in _METHODS]
                routes = request.app.routes
                allowed = [s["method"] for s in scopes if any(r.matches(s)[0] is Match.FULL for r in routes)]
                headers["Allow"] = ", ".join(allowed) or "GET, HEAD"  # no route matches below a mount of files
                detail = f"{request.method} is not allowed at {path}; use {headers['Allow']}"
            kind = next((kind for kind in ProblemType if kind.status == status), ProblemType.MALFORMED_REQUEST)
            refusal = ApiError(kind, detail, status=status)
        case _:
            # Starlette raises it again afterwards, so that the server logs the traceback.
            log.error("request_failed", method=request.method, path=path, error=f"{type(error).__name__}: {error}")
            refusal = ApiError(ProblemType.INTERNAL, "internal error; see the log of the head")
    return answer(refusal, path, headers)
