"""A learner's own small state, kept beside the weights."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.http.conditions import check_preconditions, is_unchanged
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import BINARY, GuardedRoute, author_of, bounded, guarded, head_of
from cormorant_api.weights.annotations import AnnotationStore, StoredAnnotation
from cormorant_contract.rest.annotations import MAX_ANNOTATION_BYTES, AnnotationEntry, AnnotationKey, AnnotationList
from cormorant_contract.rest.base import VERSION_MAX
from cormorant_contract.rest.headers import POLICY_VERSION
from cormorant_contract.rest.problems import ProblemType

_OCTETS = "application/octet-stream"
_VERSION = "Policy version that the value belongs to (default: the newest published one)."
_AT_MOST = "Value of this policy version, or of the highest one below it (default: the newest value)."
_CONDITIONS: list[dict[str, Any]] = [
    {"in": "header", "name": name, "schema": {"type": "string"}, "required": False, "description": text}
    for name, text in (
        ("If-Match", "Change only if this is the ETag of the newest value."),
        ("If-None-Match", "`*`: store only if the key has no value yet."),
    )
]
router = APIRouter(route_class=GuardedRoute, tags=["weights"])


@router.get("/v1/annotations", **guarded(Role.READ))
async def list_annotations(request: Request) -> AnnotationList:
    """The newest value of every key, without its bytes."""
    store = head_of(request).annotations
    return AnnotationList(annotations=tuple(found.entry for found in store.newest()), keeps=store.keeps)


@router.put(
    "/v1/annotations/{key}",
    response_model=AnnotationEntry,
    **guarded(
        Role.WRITE,
        ProblemType.UPLOAD_STALLED,
        ProblemType.VERSION_CONFLICT,
        ProblemType.ANNOTATIONS_FULL,
        ProblemType.PRECONDITION_FAILED,
        ProblemType.STORE_FAILED,
        requestBody={"required": True, "description": "At most 1 MiB.", "content": {_OCTETS: BINARY}},
        parameters=_CONDITIONS,
    ),
)
async def put_annotation(
    request: Request,
    key: AnnotationKey,
    version: Annotated[int | None, Query(ge=0, le=VERSION_MAX, description=_VERSION)] = None,
) -> Response:
    """Store a value durably. Store the value of a version before you publish that version: then the newest published
    weights always have theirs.
    """
    head = head_of(request)
    head.refuse_while_closing()
    _refuse_length(request.headers.get("content-length", ""))
    value = await Request(request.scope, bounded(request.receive, MAX_ANNOTATION_BYTES)).body()
    number = version
    if number is None:
        running = head.running
        number = await head.quick(lambda: running.publisher.version)
    belongs_to = number

    def put() -> StoredAnnotation:
        return head.annotations.put(
            key,
            belongs_to,
            value,
            author=author_of(request),
            check=lambda etag: check_preconditions(request.headers, etag),
        )

    stored = await head.disk_writes.write(f"annotation {key}", put)
    return JSONResponse(stored.entry.model_dump(mode="json"), headers=_headers(stored))


@router.get(
    "/v1/annotations/{key}",
    response_class=Response,
    **guarded(
        Role.READ,
        ProblemType.UNKNOWN_ANNOTATION,
        also={
            200: {"description": "The value.", "content": {_OCTETS: BINARY}},
            304: {"description": "The ETag matches If-None-Match."},
        },
    ),
)
async def get_annotation(
    request: Request,
    key: AnnotationKey,
    version: Annotated[int | None, Query(ge=0, le=VERSION_MAX, description=_AT_MOST)] = None,
) -> Response:
    """A value. `Cormorant-Policy-Version` names the version that it belongs to."""
    store = head_of(request).annotations
    found = store.find(key, version)
    if found is None:
        raise _unknown(store, key, version)
    if is_unchanged(request.headers, found.entry.etag):
        return Response(status_code=304, headers=_headers(found))
    return Response(found.value, media_type=_OCTETS, headers=_headers(found))


@router.delete(
    "/v1/annotations/{key}",
    status_code=204,
    response_class=Response,
    **guarded(
        Role.WRITE,
        ProblemType.UNKNOWN_ANNOTATION,
        ProblemType.PRECONDITION_FAILED,
        ProblemType.STORE_FAILED,
        parameters=_CONDITIONS[:1],
    ),
)
async def delete_annotation(request: Request, key: AnnotationKey) -> Response:
    """Remove every value of a key."""
    head = head_of(request)
    head.refuse_while_closing()

    def delete() -> bool:
        return head.annotations.delete(key, check=lambda etag: check_preconditions(request.headers, etag))

    is_known = await head.disk_writes.write(f"annotation {key}", delete)
    if not is_known:
        raise _unknown(head.annotations, key, None)
    return Response(status_code=204)


def _refuse_length(length: str) -> None:
    if length.isascii() and length.isdigit() and int(length[:18]) > MAX_ANNOTATION_BYTES:
        raise ApiError(
            ProblemType.TOO_LARGE,
            f"the value has {int(length[:18]):,} bytes, the limit of an annotation is {MAX_ANNOTATION_BYTES:,}; store "
            "the data elsewhere and its location here",
            limit_bytes=MAX_ANNOTATION_BYTES,
        )


def _unknown(store: AnnotationStore, key: str, version: int | None) -> ApiError:
    names = tuple(found.entry.key for found in store.newest())
    if key in names:
        what = f"annotation {key} has no value of version {version} or an older one"
    else:
        what = f"there is no annotation {key}; known are {', '.join(names) or 'none'}"
    return ApiError(ProblemType.UNKNOWN_ANNOTATION, what, known=names)


def _headers(annotation: StoredAnnotation) -> dict[str, str]:
    return {
        "ETag": annotation.entry.etag,
        POLICY_VERSION: str(annotation.entry.version),
        "Cache-Control": "no-store",
    }
