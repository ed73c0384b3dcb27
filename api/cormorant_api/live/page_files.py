"""Serves the live page: the files of `page/`, without a build step or external resources."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    # Revalidate on every visit, so that no page mixes files of two head versions.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    body: bytes
    media_type: str
    etag: str


def make_router() -> APIRouter:
    """Routes of the page. No token: all data comes from `/v1`."""
    found = _read()
    router = APIRouter()

    async def index(request: Request) -> Response:
        return _answer(request, found["index.html"])

    async def asset(request: Request, name: str) -> Response:
        if name not in found:
            raise ApiError(ProblemType.NOT_FOUND, f"the live page has no file {name[:80]!r}; open /")
        return _answer(request, found[name])

    router.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/page/{name}", asset, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _read() -> dict[str, _File]:
    read: dict[str, _File] = {}
    for entry in files("cormorant_api.live").joinpath("page").iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            digest = hashlib.sha256(body).hexdigest()[:32]
            read[entry.name] = _File(body=body, media_type=media_type, etag=f'"{digest}"')
    return read


def _answer(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
