"""Publishing and reading weights."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.bodies import memory_response, receive, size_of_body
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import BINARY, Answers, GuardedRoute, TheHead, author_of, guarded
from cormorant_api.weights.publisher import ALL_MODELS, matches
from cormorant_api.weights.updates import update_id, version_of
from cormorant_contract.rest import updates
from cormorant_contract.rest.base import POLICY_VERSION, SAFETENSORS, VERSION_MAX
from cormorant_contract.rest.control import LONGEST_WAIT_S
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import ITEM_BYTES, MAX_METADATA_BYTES, TORCH_NAMES
from cormorant_worker.weights.blob import WeightsBlob

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A safetensors file with the tensors named as in the model's state dict, or as `model/name`.",
        "content": {SAFETENSORS: BINARY, "application/octet-stream": BINARY},
    }
}
_PUBLISH_HEADERS: list[dict[str, Any]] = [
    {"in": "header", "name": name, "schema": {"type": "string"}, "required": False, "description": text}
    for name, text in (
        ("If-Match", "Publish only if this is the current ETag."),
        ("Prefer", "`wait=S`: respond when every worker uses the weights, or after S seconds."),
    )
]
_WAIT = re.compile(r"wait=\"?(\d{1,9}(?:\.\d{1,6})?)\"?")
_DTYPES = {attribute: name for name, attribute in TORCH_NAMES.items()}
_HEADER_MARGIN = MAX_METADATA_BYTES + (1 << 20)
_HEADER_PER_TENSOR = 512
_PUBLISH_PROBLEMS = (
    ProblemType.MALFORMED_SAFETENSORS,
    ProblemType.UNKNOWN_MODEL,
    ProblemType.UPLOAD_STALLED,
    ProblemType.VERSION_CONFLICT,
    ProblemType.LENGTH_REQUIRED,
    ProblemType.PRECONDITION_FAILED,
    ProblemType.UNSAFE_FORMAT,
    ProblemType.UNSUPPORTED_FORMAT,
    ProblemType.TENSOR_MISMATCH,
    ProblemType.NOT_FINITE,
    ProblemType.BUSY,
    ProblemType.STORE_FAILED,
    ProblemType.APPLY_TIMEOUT,
)
_PUBLISHED: Answers = {
    200: {"description": "Applied by every worker (`Prefer: wait`), or already published by the same request."},
    202: {"model": updates.Update, "description": "Staged. Poll the URL in `Location`."},
}
_PUBLISH = guarded(Role.WRITE, *_PUBLISH_PROBLEMS, also=_PUBLISHED, **_BODY, parameters=_PUBLISH_HEADERS)
_FILE = guarded(
    Role.READ,
    ProblemType.UNKNOWN_MODEL,
    ProblemType.NO_WEIGHTS,
    ProblemType.VERSION_EXPIRED,
    also={
        200: {"description": "A safetensors file.", "content": {SAFETENSORS: BINARY}},
        304: {"description": "The ETag matches If-None-Match."},
    },
)

VersionQuery = Annotated[
    int | None,
    Query(
        ge=0, le=VERSION_MAX, description="Version number (default: the next one to publish, the newest one to fetch)."
    ),
]
router = APIRouter(route_class=GuardedRoute, tags=["weights"])


@router.get("/v1/models", **guarded(Role.READ))
async def list_models(head: TheHead) -> updates.Models:
    """The policy's models and the newest version of each."""
    summaries = []
    for name, tensors in head.running.fleet.specs.items():
        stored = head.store.model(name)
        published = {"version": 0} if stored is None else stored.describe()
        summaries.append(updates.ModelSummary(name=name, num_tensors=len(tensors), **published))
    version = await head.quick(lambda: head.running.publisher.version)
    return updates.Models(models=tuple(summaries), version=version)


@router.put("/v1/models/{model}/weights", response_model=updates.Update, **_PUBLISH)
async def publish_weights(request: Request, head: TheHead, model: str, version: VersionQuery = None) -> Response:
    """Publish all weights of one model. Each worker applies all of them at its next batch boundary, or none."""
    return await _publish(request, head, _known(head, model), version)


@router.put("/v1/weights", response_model=updates.Update, **_PUBLISH)
async def publish_all_weights(request: Request, head: TheHead, version: VersionQuery = None) -> Response:
    """Publish several models atomically; name the tensors `model/name`."""
    return await _publish(request, head, ALL_MODELS, version)


@router.head("/v1/models/{model}/weights", response_class=Response, name="head_weights", **_FILE)
@router.get("/v1/models/{model}/weights", response_class=Response, **_FILE)
async def get_weights(request: Request, head: TheHead, model: str, version: VersionQuery = None) -> Response:
    """Download published weights; 304 if they have the ETag of If-None-Match."""
    stored = head.running.publisher.find(_known(head, model), version)
    headers = {"ETag": stored.etag, POLICY_VERSION: str(stored.version)}
    if matches(request.headers.get("if-none-match", "").replace("W/", ""), stored.etag):
        return Response(status_code=304, headers=headers)
    return memory_response(
        stored.buffers,
        media_type=SAFETENSORS,
        headers=headers,
        stall_timeout_s=head.settings.stall_timeout_s,
    )


@router.get("/v1/models/{model}/versions", **guarded(Role.READ, ProblemType.UNKNOWN_MODEL))
async def list_versions(head: TheHead, model: str) -> updates.Versions:
    """Retained versions, newest first."""
    entries = tuple(
        updates.VersionEntry(published_at=stored.published_at, author=stored.author, **stored.models[model].describe())
        for stored in head.store.history(_known(head, model))
    )
    return updates.Versions(model=model, versions=entries)


@router.post(
    "/v1/models/{model}:rollback",
    status_code=202,
    response_model=updates.Update,
    **guarded(
        Role.WRITE,
        ProblemType.UNKNOWN_MODEL,
        ProblemType.NO_WEIGHTS,
        ProblemType.VERSION_EXPIRED,
        ProblemType.VERSION_CONFLICT,
        ProblemType.UNSUPPORTED_FORMAT,
        ProblemType.TENSOR_MISMATCH,
        ProblemType.BUSY,
        ProblemType.STORE_FAILED,
    ),
)
async def rollback_weights(request: Request, head: TheHead, model: str, body: updates.Rollback) -> Response:
    """Publish a retained version again under a new version number."""
    head.refuse_while_closing()
    known = _known(head, model)
    publisher = head.running.publisher
    with head.uploads.of(publisher.find(known, body.version).size_bytes):
        update = await head.bulk(publisher.rollback, known, body.version, author=author_of(request))
    return await _published(head, update)


@router.get("/v1/updates/{update}", **guarded(Role.READ, ProblemType.UNKNOWN_UPDATE))
async def get_update(
    head: TheHead, update: str, wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)] = 0.0
) -> updates.Update:
    """Progress of a publish with receipts per worker. `wait`: seconds to wait for its end."""
    if (accepted := head.running.publisher.update(version_of(update))) is None:
        raise ApiError(ProblemType.UNKNOWN_UPDATE, f"unknown update id {update[:40]!r}; ids look like {update_id(7)}")
    return await _after_wait(head, accepted, wait)


async def _publish(request: Request, head: Head, model: str, version: int | None) -> Response:
    running = head.running
    head.refuse_while_closing()
    specs = running.fleet.specs
    if not specs:
        raise ApiError(ProblemType.UNKNOWN_MODEL, "the policy has no weights to publish", known=())
    tensors = [spec for tensors in specs.values() for spec in tensors.values()]
    expected = sum(ITEM_BYTES.get(_DTYPES.get(spec.dtype, spec.dtype), 8) * math.prod(spec.shape) for spec in tensors)
    # Twice the expected size, so that weights of another policy get a report of the differences.
    limit_bytes = 2 * expected + _HEADER_MARGIN + _HEADER_PER_TENSOR * len(tensors)
    size = size_of_body(request, limit_bytes=min(head.settings.max_body_bytes, limit_bytes))
    with head.uploads.of(size):
        blob = WeightsBlob(size)
        received = await receive(request, blob.buffer, stall_timeout_s=head.settings.stall_timeout_s)
        head.refuse_while_closing()
        update, is_new = await head.bulk(
            running.publisher.publish,
            blob,
            received,
            model=model,
            version=version,
            author=author_of(request),
            headers=request.headers,
        )
    if is_new:
        head.metrics.update_bytes.inc(update.bytes)
    wait_s = preferred_wait_s(request.headers, LONGEST_WAIT_S)
    return await _published(head, update, is_new=is_new, wait_s=wait_s)


async def _published(head: Head, update: updates.Update, *, is_new: bool = True, wait_s: float = 0.0) -> Response:
    update = await _after_wait(head, update, wait_s)
    if wait_s and update.state == "failed":
        raise ApiError(ProblemType.APPLY_TIMEOUT, update.error, update_id=update.update_id)
    headers = {"ETag": update.etag, "Location": f"/v1/updates/{update.update_id}"}
    status = 200 if not is_new or (wait_s and update.state == "applied") else 202
    return JSONResponse(update.model_dump(mode="json"), status_code=status, headers=headers)


def preferred_wait_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds of `Prefer: wait=S` (RFC 7240); 0 if it is missing or malformed."""
    match = _WAIT.search(headers.get("prefer", ""))
    return min(float(match[1]), longest_s) if match else 0.0


async def _after_wait(head: Head, update: updates.Update, wait_s: float) -> updates.Update:
    running = head.running
    if wait_s > 0:
        await running.updates.notifier.wait_for(
            lambda: (
                head.is_draining or head.is_closing or running.updates.state_of(update.version) in updates.FINAL_STATES
            ),
            timeout_s=wait_s,
        )
    return running.publisher.update(update.version) or update


def _known(head: Head, model: str) -> str:
    specs = head.running.fleet.specs
    if model not in specs:
        names = tuple(sorted(specs))
        have = f"its models are {', '.join(names)}" if names else "it has no models (it is random or a plain callable)"
        raise ApiError(ProblemType.UNKNOWN_MODEL, f"the policy has no model {model[:80]!r}; {have}", known=names)
    return model
