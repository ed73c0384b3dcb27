"""The result table of an evaluation."""

from fastapi import APIRouter, Request

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, guarded, head_of
from cormorant_contract.rest.evaluation import EvaluationTable
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["status"])


@router.get("/v1/evaluation", response_model_exclude_defaults=True, **guarded(Role.READ, ProblemType.NOT_FOUND))
async def get_evaluation(request: Request) -> EvaluationTable:
    """Every episode whose result is durable, and the summary of these. Episodes appear when their worker reports."""
    head = head_of(request)
    book = head.running.fleet.episodes
    if book is None:
        raise ApiError(ProblemType.NOT_FOUND, "the job is no evaluation; set collection.episodes in its manifest")
    table = await head.bulk(book.table)
    return EvaluationTable.model_validate(table.document())
