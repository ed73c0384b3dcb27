"""The CRD at a real API server: it takes the schema, and its verdict on each manifest is the one of the table."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings

from cormorant_cli.commands.crd import crd_yaml
from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job
from cormorant_testing.kubectl import skip_without_cluster
from manifest_cases import INVALID, VALID
from manifest_making import Case
from manifest_strategies import changed_manifests
from manifest_updates import UPDATES, Update

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    is_accepted: bool
    text: str


class Kubectl:
    """The API server through kubectl, in a namespace of its own."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *arguments: str, document: object = None) -> Answer:
        text = document if isinstance(document, str) else json.dumps(document)
        done = subprocess.run(
            ["kubectl", "--namespace", self.namespace, *arguments],
            input=text if document is not None else None,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Answer(is_accepted=done.returncode == 0, text=done.stdout + done.stderr)

    def create(self, document: dict[str, Any]) -> Answer:
        # The client's own validation would answer first and in other words: only the server is asked.
        return self("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", document=document)


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    skip_without_cluster()
    kubectl = Kubectl(f"crd-{uuid4().hex[:8]}")
    applied = kubectl("apply", "-f", "-", document=crd_yaml())
    assert applied.is_accepted, applied.text
    established = kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd/collectorjobs.cormorant.dev")
    assert established.is_accepted, established.text
    assert kubectl("create", "namespace", kubectl.namespace).is_accepted
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_api_server_accepts(kubectl: Kubectl, document: dict[str, Any]) -> None:
    answer = kubectl.create(document)
    assert answer.is_accepted, answer.text


@pytest.mark.parametrize("case", INVALID.values(), ids=INVALID)
def test_api_server_refuses_and_names_the_field(kubectl: Kubectl, case: Case) -> None:
    answer = kubectl.create(case.document)
    assert not answer.is_accepted
    assert case.path in answer.text
    if case.by == "rule":
        assert case.sentence in answer.text


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_api_server_keeps_what_cannot_change(kubectl: Kubectl, update: Update) -> None:
    assert kubectl("create", "-f", "-", document=update.old).is_accepted
    try:
        answer = kubectl("replace", "-f", "-", document=update.new)
    finally:
        kubectl("delete", "collectorjob", "pong")
    assert answer.is_accepted == (update.path == ""), answer.text
    assert update.path in answer.text


def test_every_field_is_explained(kubectl: Kubectl) -> None:
    answer = kubectl("explain", "collectorjob.spec.collection.weights.maxStaleness")
    assert "strictly on-policy" in answer.text


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_stored_job_is_the_one_of_the_models(kubectl: Kubectl, document: dict[str, Any]) -> None:
    stored = json.loads(kubectl.create(document).text)
    assert stored["spec"] == parse_job(document).to_document()["spec"]
    assert parse_job(stored).spec == parse_job(document).spec


def test_scale_subresource_reads_and_writes_replicas(kubectl: Kubectl) -> None:
    assert kubectl("create", "-f", "-", document=VALID["replicas-at-bounds"]).is_accepted
    try:
        assert not kubectl("scale", "cjob/pong", "--replicas=5").is_accepted
        assert kubectl("scale", "cjob/pong", "--replicas=4").is_accepted
        table = kubectl("get", "cjob").text
    finally:
        kubectl("delete", "collectorjob", "pong")
    assert table.split()[:9] == ["NAME", "PHASE", "REASON", "FRAMES", "TARGET", "FPS", "VERSION", "WORKERS", "AGE"]


def test_verdicts_agree_on_manifests_with_one_value_changed(kubectl: Kubectl) -> None:
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(changed_manifests())
    def agree(document: dict[str, Any]) -> None:
        answer = kubectl.create(document)
        try:
            parse_job(document)
        except ManifestError:
            assert not answer.is_accepted
        else:
            assert answer.is_accepted, answer.text

    agree()
