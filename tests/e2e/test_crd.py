"""The CRD at a real API server: it takes the schema, and its verdict on each manifest is the one of the table."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job
from cormorant_testing.kubectl import Namespace
from manifest_cases import INVALID, UPDATES, VALID, Update, changed_manifests
from manifest_making import Case


class Server(Namespace):
    """The API server, in a namespace of its own."""

    def create(self, document: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        # The client's own validation would answer first and in other words: only the server is asked.
        return self.run("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", document=document)


@pytest.fixture(scope="module")
def kubectl(cluster: None) -> Iterator[Server]:
    with Server("crd") as server:
        yield server


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_stored_job_is_the_one_of_the_models(kubectl: Server, document: dict[str, Any]) -> None:
    answer = kubectl.create(document)
    assert answer.returncode == 0, answer.stderr
    stored = json.loads(answer.stdout)
    assert stored["spec"] == parse_job(document).to_document()["spec"]
    assert parse_job(stored).spec == parse_job(document).spec


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_api_server_refuses_and_names_the_field(kubectl: Server, case: Case) -> None:
    answer = kubectl.create(case.document)
    assert answer.returncode
    # A rule over the values of a map is answered with the key in brackets: spec.policy.agents[red].
    assert case.path in re.sub(r"\[([a-z][\w-]*)\]", r".\1", answer.stderr)
    if case.by == "rule":
        assert case.sentence in answer.stderr


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_api_server_keeps_what_cannot_change(kubectl: Server, update: Update) -> None:
    kubectl("create", "-f", "-", document=update.old)
    try:
        answer = kubectl.run("replace", "-f", "-", document=update.new)
    finally:
        kubectl("delete", "collectorjob", "pong")
    assert (answer.returncode == 0) == (update.path == ""), answer.stderr
    assert update.path in answer.stderr


def test_verdicts_agree_on_manifests_with_one_value_changed(kubectl: Server) -> None:
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(changed_manifests())
    def agree(document: dict[str, Any]) -> None:
        answer = kubectl.create(document)
        try:
            parse_job(document)
        except ManifestError:
            assert answer.returncode
        else:
            assert answer.returncode == 0, answer.stderr

    agree()
