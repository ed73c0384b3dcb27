"""The FastAPI application over a head. Both listeners serve the same object."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from cormorant_api.head import Head
from cormorant_api.http import problems
from cormorant_api.http.docs_page import render
from cormorant_api.live import page_files
from cormorant_api.live.moments import Moments
from cormorant_api.live.previews import Previews
from cormorant_api.routes import batches, control, events, live, pauses, state, status, weights
from cormorant_api.routes.request_metrics import RequestMetrics
from cormorant_contract.base import in_json_schema_words
from cormorant_contract.rest.batches import MemoryBatch
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.live import Bye, Hello, Moment, Opening
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


def make_app(head: Head | None = None) -> FastAPI:
    """Make the application; without a head it serves only the OpenAPI document."""
    app = FastAPI(
        title="Cormorant",
        version="1",
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.head = head
    if head is not None:
        app.state.live, app.state.previews = Moments(head), Previews(head)
        head.watchers.append(app.state.live.observe)
    for module in (weights, batches, pauses, state, status, events, live, control):
        app.include_router(module.router)
    app.include_router(status.health)
    problems.install(app)
    app.include_router(page_files.make_router())
    if head is not None:
        app.add_middleware(RequestMetrics, head=head)
    app.add_api_route("/docs", lambda: HTMLResponse(render(app.openapi())), include_in_schema=False)
    app.openapi = _documented(app)  # type: ignore[method-assign]  # FastAPI's own way of extending the document
    return app


def _documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
                separate_input_output_schemas=False,
            )
            parts = document.setdefault("components", {})
            for model in (Problem, MemoryBatch, Event, Hello, Opening, Moment, Bye):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas = {**schema.pop("$defs", {}), model.__name__: schema}
                parts.setdefault("schemas", {}).update(schemas)
            parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = in_json_schema_words(document)
        return app.openapi_schema

    return openapi
