"""What the API server says when it does not create a pod, and what the operator takes it for.

The bodies are those of Kubernetes 1.34, shortened; a busy one answers 429 in plain text, which counts as the message.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from cormorant_operator.cache import Cache
from cormorant_operator.decide.plan import CheckTemplate, CreatePod
from cormorant_operator.executor import Executor
from cormorant_operator.job_state import JobState, RefusalKind
from cormorant_operator.kube.client import error_of
from cormorant_testing.operator_world import World, make_job, of_kind

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FORBIDDEN = 'pods "p" is forbidden: '
WEBHOOK = 'failed calling webhook "away.example.com": failed to call webhook: Post "https://127.0.0.1:1/": refused'
QUOTA, INVALID, SERVER = RefusalKind.QUOTA, RefusalKind.INVALID, RefusalKind.SERVER
NAMESPACE, NO_RIGHT = RefusalKind.NAMESPACE, RefusalKind.FORBIDDEN
ANSWERS = {
    "quota": (403, FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0", QUOTA),
    "quota-of-requests": (403, FORBIDDEN + "failed quota: q: must specify requests.cpu for: c", QUOTA),
    "quota-of-limits": (403, FORBIDDEN + "failed quota: q: must specify limits.memory for: c", QUOTA),
    "pod-security": (403, FORBIDDEN + 'violates PodSecurity "restricted:latest": runAsNonRoot != true', INVALID),
    "limit-range": (403, FORBIDDEN + "maximum cpu usage per Container is 1, but limit is 2", NO_RIGHT),
    "rights": (403, 'pods is forbidden: User "nobody" cannot create resource "pods" in API group ""', NO_RIGHT),
    "namespace-terminating": (403, FORBIDDEN + "unable to create new content in namespace t", NAMESPACE),
    "namespace-gone": (404, 'namespaces "nowhere" not found', NAMESPACE),
    "invalid": (422, 'Pod "p" is invalid: spec.containers[0].imagePullPolicy: Unsupported', INVALID),
    "webhook-away": (500, f"Internal error occurred: {WEBHOOK}", SERVER),
    "busy": (429, "Too many requests, please try again later.", SERVER),
}
CAUSES = {
    "namespace-terminating": {"reason": "NamespaceTerminating", "message": "namespace t is being terminated"},
    "invalid": {"reason": "FieldValueNotSupported", "field": "spec.containers[0].imagePullPolicy"},
    "webhook-away": {"message": WEBHOOK},
}


class Refusing:
    """An API server that answers each creation so."""

    def __init__(self, name: str) -> None:
        self._code, message, _ = ANSWERS[name]
        details = {"causes": [CAUSES[name]]} if name in CAUSES else {}
        self._answer = {"kind": "Status", "status": "Failure", "message": message, "details": details}

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> dict[str, Any]:
        raise error_of(self._code, self._answer, request="POST pods")


def memory_after(action: CheckTemplate | CreatePod, name: str) -> JobState:
    state, api, nobody = JobState(), Refusing(name), object()
    given: Any = (api, nobody)
    executor = Executor(*given, Cache(), key=b"k" * 32, clock=lambda: NOW)
    asyncio.run(executor.do(make_job(), action, state, decided_at=NOW))
    return state


@pytest.mark.parametrize("name", ANSWERS)
def test_refused_pod_is_understood_and_told_in_the_servers_words(name: str) -> None:
    _, message, kind = ANSWERS[name]
    check = of_kind(World().plan().actions, CheckTemplate)[0]
    refusal = memory_after(CreatePod(owner="cpu", manifest=check.manifest), name).refusals["cpu"]
    assert (refusal.kind, refusal.message) == (kind, message)
    # A template is blamed for what is its own fault alone.
    verdict = memory_after(check, name).verdicts.get(check.template)
    error = message if kind in (INVALID, NO_RIGHT) else ""
    assert (verdict.error if verdict is not None else None) == (None if kind is SERVER else error)
