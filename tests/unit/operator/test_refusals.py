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


def body(code: int, reason: str, message: str, **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "details": {"name": "p", "kind": "pods", **details},
        "code": code,
    }


TERMINATING = {"reason": "NamespaceTerminating", "message": "namespace t is being terminated", "field": "metadata"}
UNSUPPORTED = {"reason": "FieldValueNotSupported", "field": "spec.containers[0].imagePullPolicy"}
ANSWERS = {
    "quota": (
        body(403, "Forbidden", FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0"),
        RefusalKind.QUOTA,
    ),
    "quota-of-requests": (
        body(403, "Forbidden", FORBIDDEN + "failed quota: q: must specify requests.cpu for: c"),
        RefusalKind.QUOTA,
    ),
    "quota-of-limits": (
        body(403, "Forbidden", FORBIDDEN + "failed quota: q: must specify limits.memory for: c; requests.cpu for: c"),
        RefusalKind.QUOTA,
    ),
    "pod-security": (
        body(403, "Forbidden", FORBIDDEN + 'violates PodSecurity "restricted:latest": runAsNonRoot != true'),
        RefusalKind.INVALID,
    ),
    "limit-range": (
        body(403, "Forbidden", FORBIDDEN + "maximum cpu usage per Container is 1, but limit is 2"),
        RefusalKind.FORBIDDEN,
    ),
    "rights": (
        body(403, "Forbidden", 'pods is forbidden: User "nobody" cannot create resource "pods" in API group ""'),
        RefusalKind.FORBIDDEN,
    ),
    "namespace-terminating": (
        body(
            403,
            "Forbidden",
            FORBIDDEN + "unable to create new content in namespace t because it is being terminated",
            causes=[TERMINATING],
        ),
        RefusalKind.NAMESPACE,
    ),
    "namespace-gone": (
        body(404, "NotFound", 'namespaces "nowhere" not found', kind="namespaces"),
        RefusalKind.NAMESPACE,
    ),
    "invalid": (
        body(
            422, "Invalid", 'Pod "p" is invalid: spec.containers[0].imagePullPolicy: Unsupported', causes=[UNSUPPORTED]
        ),
        RefusalKind.INVALID,
    ),
    "webhook-away": (
        body(500, "InternalError", f"Internal error occurred: {WEBHOOK}", causes=[{"message": WEBHOOK}]),
        RefusalKind.SERVER,
    ),
    "busy": (
        body(429, "TooManyRequests", "Too many requests, please try again later.", retryAfterSeconds=1),
        RefusalKind.SERVER,
    ),
}


class Refusing:
    """An API server that answers each creation so."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    async def create(self, manifest: Mapping[str, Any], *, is_dry_run: bool = False) -> dict[str, Any]:
        raise error_of(self._answer["code"])(self._answer["code"], self._answer, request="POST pods")


def memory_after(action: CheckTemplate | CreatePod, answer: dict[str, Any]) -> JobState:
    state, api, nobody = JobState(), Refusing(answer), object()
    given: Any = (api, nobody)
    executor = Executor(*given, Cache(), key=b"k" * 32, clock=lambda: NOW)
    asyncio.run(executor.do(make_job(), action, state, decided_at=NOW))
    return state


def checks() -> list[CheckTemplate]:
    return of_kind(World().plan().actions, CheckTemplate)


@pytest.mark.parametrize("name", ANSWERS)
def test_refused_pod_is_understood_and_told_in_the_servers_words(name: str) -> None:
    answer, kind = ANSWERS[name]
    manifest = checks()[0].manifest
    refusal = memory_after(CreatePod(owner="cpu", manifest=manifest), answer).refusals["cpu"]
    assert (refusal.kind, refusal.message) == (kind, answer["message"])


@pytest.mark.parametrize("name", ANSWERS)
def test_template_is_blamed_for_what_is_its_own_fault_alone(name: str) -> None:
    answer, kind = ANSWERS[name]
    check = checks()[0]
    verdict = memory_after(check, answer).verdicts.get(check.template)
    if kind is RefusalKind.SERVER:
        assert verdict is None
    else:
        is_its_fault = kind in (RefusalKind.INVALID, RefusalKind.FORBIDDEN)
        assert verdict is not None
        assert verdict.error == (answer["message"] if is_its_fault else "")
