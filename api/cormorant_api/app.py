"""The FastAPI application over a head, its documents and the live page. Both listeners serve the same object."""

import asyncio
import os
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi_offline import FastAPIOffline
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http import problems
from cormorant_api.live.moments import Moments
from cormorant_api.routes import batches, control, status, weights
from cormorant_contract.base import in_json_schema_words
from cormorant_contract.rest.batches import MemoryBatch
from cormorant_contract.rest.live import Bye, Event, Hello, Moment, Opening
from cormorant_contract.rest.problems import Problem

_DESCRIPTION = """The control plane of one CollectorJob: publish weights, pause, save and restore, take batches.

Errors are `application/problem+json`; tell them apart by `type`. Send a token with every request except probes,
metrics and this documentation: `Authorization: Bearer TOKEN`. Roles: read < write < operator."""
_TAGS = [
    {"name": "weights", "description": "Publish, fetch and roll back weights; receipts per worker."},
    {"name": "batches", "description": "Take batches and acknowledge them; delivery is at least once."},
    {"name": "lifecycle", "description": "Pause leases, the state and the seed of the fleet."},
    {"name": "status", "description": "Status, workers, events and the live stream."},
    {"name": "operator", "description": "Group sizes and drain; used by the operator."},
    {"name": "health", "description": "Probes, metrics and version; no token needed."},
]

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_PAGE_HEADERS = {
    # Revalidate on every visit, so that no page mixes files of two head versions.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _PAGE_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_app(head: Head | None = None) -> FastAPI:
    """Make the application; without a head it serves only the OpenAPI document."""
    app = FastAPIOffline(  # ships the files of `/docs`: a cluster may have no internet access
        docs_url=None,  # FastAPI's own page works only at the root
        redoc_url=None,
        static_url="/docs-static",
        title="Cormorant",
        version=version("cormorant"),
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,
    )

    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = generate()
            for operation in (one for path in document["paths"].values() for one in path.values()):
                # A collapsed row shows only the summary: use a sentence instead of the function's name.
                sentence = operation["description"].partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
                operation["summary"] = sentence.rstrip(".")
            parts = document.setdefault("components", {})
            for model in (Problem, MemoryBatch, Event, Hello, Opening, Moment, Bye):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas = {**schema.pop("$defs", {}), model.__name__: schema}
                parts.setdefault("schemas", {}).update(schemas)
            parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = in_json_schema_words(document)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending the document
    for module in (weights, batches, control, status):
        app.include_router(module.router)
    app.include_router(control.operator)
    app.include_router(status.health)
    problems.install(app)
    page = _PageFiles(packages=[("cormorant_api.live", "page")])

    async def index(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    async def docs() -> Response:
        return get_swagger_ui_html(
            title=f"{app.title} - Swagger UI",
            # Relative, as on the live page: a proxy may serve the head below a path of its own.
            openapi_url="openapi.json",
            swagger_js_url="docs-static/swagger-ui-bundle.js",
            swagger_css_url="docs-static/swagger-ui.css",
            swagger_favicon_url="docs-static/favicon.png",
            # Swagger UI would show its online validator's badge.
            swagger_ui_parameters={"validatorUrl": None},
        )

    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/page", page)
    app.state.head = head
    if head is not None:
        app.state.live = Moments(head)
        head.watchers.append(app.state.live.observe)
        app.add_middleware(_Answers, head=head)
    return app


class _PageFiles(StaticFiles):
    """The files of the live page. They need no token: all data comes from `/v1`."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """The file, or 304 if it has not changed."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_PAGE_HEADERS)
        return response


class _Answers:
    """Counts refused publishes, and answers requests that a closing head cancels."""

    def __init__(self, app: ASGIApp, head: Head) -> None:
        self._app, self._head = app, head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0  # of a request: listeners have neither web sockets nor a lifespan

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            # uvicorn would answer 500, which a learner takes for a failed job.
            if status:
                raise
            try:
                self._head.refuse_while_closing()
            except ApiError as closing:
                await problems.answer(closing, scope["path"])(scope, receive, noting)
            else:
                raise
        if scope["method"] == "PUT" and scope["path"].endswith("/weights") and 400 <= status < 500:
            self._head.metrics.results["rejected"].inc()
