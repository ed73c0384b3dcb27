"""The models' verdict on the table of manifests; and the CRD: structural, described, small.

An API server's verdict on the same table is in `tests/e2e/test_crd.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_contract.errors import ManifestError
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_contract.schema import crd, structural_schema
from manifest_cases import INVALID, VALID
from manifest_making import Case, manifest

KWARGS = "spec.env.envpool.kwargs"


def problems_of(document: object) -> dict[str, str]:
    with pytest.raises(ManifestError) as caught:
        parse_job(document, "job.yaml")
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_accepted(document: dict[str, Any]) -> None:
    job = parse_job(document)
    assert CollectorJob.model_validate(job.to_document()) == job


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_refused_once_with_field_value_and_remedy(case: Case) -> None:
    problems = problems_of(case.document)
    assert list(problems) == [case.path]
    assert case.sentence in problems[case.path]


@pytest.mark.parametrize(
    ("document", "path", "sentence"),
    [
        ({}, "kind", "is missing; write kind: CollectorJob"),
        ({"kind": "CollectorJob"}, "apiVersion", "is missing"),
        ({"kind": "CollectorJob", "apiVersion": "cormorant.dev/v1"}, "apiVersion", '"cormorant.dev/v1" is not supp'),
        # What JSON has not.
        (manifest(env__envpool__kwargs={"a": float("nan")}), KWARGS, "nan is not a finite number"),
        (manifest(env__envpool__kwargs={"a": [{"b": float("-inf")}]}), KWARGS, "-inf is not a finite"),
        (manifest(env__envpool__kwargs={"a": b"x"}), f"{KWARGS}.a", "input was not a valid JSON value"),
        (manifest(env__envpool__kwargs={1: 2}), f"{KWARGS}[1].[key]", "1 is not a string; quote it"),
        (
            manifest(collection__totalFrames=10**5000),
            "spec.collection.totalFrames",
            "a number of thousands of digits is",
        ),
    ],
)
def test_what_is_no_manifest_gets_one_sentence(document: object, path: str, sentence: str) -> None:
    problems = problems_of(document)
    assert list(problems) == [path]
    assert sentence in problems[path]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


NODES = dict(nodes(structural_schema()))


def test_every_field_is_described() -> None:
    bare = [path for path, node in NODES.items() if "description" not in node and not path.endswith(".metadata")]
    assert bare == []


def test_every_string_list_and_number_has_an_end() -> None:
    for path, node in NODES.items():
        if path in (".apiVersion", ".kind"):
            continue
        match node.get("type"):
            case None:
                assert node.keys() >= {"pattern", "minimum", "maximum"}, path
            case "string":
                assert node.keys() & {"maxLength", "enum", "format"}, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert node["minimum"] >= -(2**31), path
                # Bounds beyond this are not exact in the API server, which compares floating point.
                assert node["maximum"] < 2**53, path


def test_paths_of_the_scale_and_the_columns_exist() -> None:
    (version,) = crd()["spec"]["versions"]
    columns = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths = {*columns, *version["subresources"]["scale"].values()} - {".metadata.creationTimestamp"}
    assert paths <= NODES.keys()
    assert NODES[".spec.replicas"]["default"] == 1


def test_the_crd_is_small() -> None:
    # As the API server stores it, and kubectl in an annotation.
    assert len(json.dumps(crd(), separators=(",", ":")).encode()) < 64 * 1024
