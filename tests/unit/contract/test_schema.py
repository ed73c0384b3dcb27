"""The CRD: structural, described, small, and of one mind with the models."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job
from cormorant_contract.schema import crd, structural_schema
from manifest_cases import INVALID, UPDATES, VALID, Update, changed_manifests
from manifest_making import Case
from structural import refused_changes, verdict, with_defaults


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


NODES = dict(nodes(structural_schema()))


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_schema_and_cel_accept(document: dict[str, Any]) -> None:
    assert verdict(document) == []


# The API server brings metadata's own schema along; the CRD narrows the name and nothing else.
REFUSED_BY_THE_CRD = [case for case in INVALID if case.path != "metadata.lables"]


@pytest.mark.parametrize("case", REFUSED_BY_THE_CRD, ids=str)
def test_schema_and_cel_refuse(case: Case) -> None:
    complaints = verdict(case.document)
    assert complaints
    if case.by == "rule":
        assert any(complaint.startswith(f".{case.path}: ") for complaint in complaints)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changed_manifests())
def test_models_and_schema_agree_on_one_changed_value(document: dict[str, Any]) -> None:
    complaints = verdict(document)
    try:
        again = parse_job(document).to_document()
    except ManifestError:
        assert complaints
        return
    assert complaints == []
    assert parse_job(again).to_document() == again
    assert verdict(again) == []


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_update_keeps_what_cannot_change(update: Update) -> None:
    assert refused_changes(update.old, update.new) == ([update.path] if update.path else [])


def test_nodes_are_structural() -> None:
    for path, node in NODES.items():
        if "x-kubernetes-int-or-string" in node:
            # The only form that the API server allows, letter by letter.
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in node, path
            continue
        assert isinstance(node.get("type"), str), path
        assert not node.keys() & {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "const", "ge", "le", "nullable"}, (
            path
        )
        assert node.get("additionalProperties") is not False, path


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


def test_default_of_the_schema_is_the_default_of_the_models() -> None:
    document = VALID["smallest"]
    filled = with_defaults({"spec": dict(document["spec"])}, structural_schema())
    assert filled["spec"] == parse_job(document).to_document()["spec"]

    assert [path for path, node in NODES.items() if path.startswith(".status") and "default" in node] == []


def test_paths_of_the_scale_and_the_columns_exist() -> None:
    (version,) = crd()["spec"]["versions"]
    columns = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths = {*columns, *version["subresources"]["scale"].values()} - {".metadata.creationTimestamp"}
    assert paths <= NODES.keys()
    assert NODES[".spec.replicas"]["default"] == 1


def test_the_crd_is_small() -> None:
    # As the API server stores it, and kubectl in an annotation.
    assert len(json.dumps(crd(), separators=(",", ":")).encode()) < 64 * 1024


def test_keyed_lists_are_keyed_by_required_fields() -> None:
    keyed = {path: node for path, node in NODES.items() if "x-kubernetes-list-map-keys" in node}
    assert {".spec.workerGroups", ".spec.env.info", ".status.groups", ".status.conditions"} <= set(keyed)
    for node in keyed.values():
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"])
