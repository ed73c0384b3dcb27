"""Serves the live page: the files of `page/`, without a build step or external resources."""

import hashlib
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


def make_router() -> APIRouter:
    """Routes of the page. No token: all data comes from `/v1`."""
    found = {
        entry.name: (entry.read_bytes(), _TYPES[kind])
        for entry in files("cormorant_api.live").joinpath("page").iterdir()
        if (kind := entry.name.rpartition(".")[2]) in _TYPES
    }
    router = APIRouter()

    async def page_file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in found:
            raise ApiError(ProblemType.NOT_FOUND, f"the live page has no file {name[:80]!r}; open /")
        body, media_type = found[name]
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {**_HEADERS, "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    for path in ("/", "/page/{name}"):
        router.add_api_route(path, page_file, methods=["GET", "HEAD"], include_in_schema=False)
    return router
