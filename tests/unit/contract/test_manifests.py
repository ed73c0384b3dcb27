"""The verdict of the models on the table of manifests; and the CRD: structural, described, small, and of one mind with
the models.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import celpy
import jsonschema
import pytest
from celpy.adapter import json_to_cel
from hypothesis import HealthCheck, given, settings

from cormorant_contract.errors import ManifestError
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_contract.schema import crd, structural_schema
from manifest_cases import INVALID, UPDATES, VALID, Update, changed_manifests
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


def test_all_problems_are_reported_at_once() -> None:
    document = manifest("Pong", env__envpool__numEnvs=0, collection__mode="fast", replicas="2", bogus=1)
    assert set(problems_of(document)) == {
        "metadata.name",
        "spec.env.envpool.numEnvs",
        "spec.collection.mode",
        "spec.replicas",
        "spec.bogus",
    }


@pytest.mark.parametrize(
    ("document", "path", "sentence"),
    [
        (None, "", "the document is empty"),
        ([], "", "the document is a list, not a manifest"),
        ({}, "kind", "is missing; add kind: CollectorJob"),
        ({"kind": "Deployment"}, "kind", '"Deployment" is not CollectorJob'),
        ({"kind": "collectorjob"}, "kind", "case-sensitive"),
        ({"kind": "CollectorJobs"}, "kind", "did you mean CollectorJob?"),
        ({"kind": "CollectorJob"}, "apiVersion", "is missing"),
        ({"kind": "CollectorJob", "apiVersion": "cormorant.dev/v1"}, "apiVersion", '"cormorant.dev/v1" is not supp'),
        # What JSON has not.
        (manifest(env__envpool__kwargs={"a": float("nan")}), f"{KWARGS}.a", "nan is not a finite number"),
        (manifest(env__envpool__kwargs={"a": [{"b": float("-inf")}]}), f"{KWARGS}.a[0].b", "-inf is not a finite"),
        (manifest(env__envpool__kwargs={"a": b"x"}), f"{KWARGS}.a", "bytes is not allowed in a manifest"),
        (manifest(env__envpool__kwargs={1: 2}), f"{KWARGS}.1", "the key is a number, not a string; quote it"),
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


def test_problem_names_file_document_and_job() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_job(manifest(env__envpool__numEnvs=0), "jobs.yaml", position=2)
    assert str(caught.value) == (
        "jobs.yaml: document 2 (pong): spec.env.envpool.numEnvs: 0 is less than 1; write a number from 1 to 65536"
    )


def test_document_is_not_changed_and_null_inside_kwargs_is_the_users_own() -> None:
    kwargs = {"noop_max": None, "deep": {"x": [None]}}
    document = manifest(env__gymnasium=None, env__envpool__kwargs=kwargs, replicas=2.0)
    before = repr(document)
    block = parse_job(document).to_document()["spec"]["env"]["envpool"]
    assert (repr(document), block["kwargs"]) == (before, kwargs)


def test_status_of_a_running_job_is_read() -> None:
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "FleetReady",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
        "observedGeneration": 1,
    }
    document = manifest() | {"status": {"phase": "Running", "frames": {"collected": 7}, "conditions": [condition]}}
    job = parse_job(document)
    assert job.status.frames.collected == 7
    assert job.to_document()["status"]["conditions"] == [condition | {"message": ""}]


@pytest.mark.parametrize("time", [1769860800, "yesterday", "2026-01-31T12:00:00"])
def test_status_time_that_is_no_time_is_refused(time: object) -> None:
    problems = problems_of(manifest() | {"status": {"startTime": time}})
    assert "a time like 2026-01-31T12:00:00Z" in problems["status.startTime"]


@pytest.mark.parametrize("value", ["team-a", "Team A"])
def test_label_of_a_queue_names_a_local_queue(value: str) -> None:
    document = manifest()
    labels = {"kueue.x-k8s.io/queue-name": value}
    document = {**document, "metadata": {**document["metadata"], "labels": labels}}
    if value == "team-a":
        assert parse_job(document).metadata.labels == labels
        return
    with pytest.raises(ManifestError, match="Team A is not the name of a LocalQueue; write lower-case letters"):
        parse_job(document)


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


Document = dict[str, Any]

# Made once, at import: it raises the recursion limit, which hypothesis forbids in the middle of a test.
_CEL = celpy.Environment()


def verdict(document: Document) -> list[str]:
    """What the API server would object to: fields first, then, when there is nothing, rules."""
    document = with_defaults(deepcopy(document), structural_schema())
    validator = jsonschema.Draft202012Validator(structural_schema())
    complaints = [error.message for error in validator.iter_errors(document)]
    complaints += unknown_fields(document, structural_schema())
    complaints += duplicate_keys(document, structural_schema())
    return complaints or [f"{path}: {rule}" for path, rule in broken_rules(document, structural_schema())]


def _known(value: Document, schema: Document) -> Document:
    """Schemas of an object's fields, or of a map's values."""
    if "additionalProperties" in schema:
        return dict.fromkeys(value, schema["additionalProperties"])
    return schema.get("properties", {})


def with_defaults(value: Any, schema: Document) -> Any:
    """Drop null fields and fill defaults, in the API server's order."""
    if isinstance(value, dict) and (known := _known(value, schema)):
        for key in [key for key, item in value.items() if item is None and key in known]:
            del value[key]
        for key, child in known.items():
            if key not in value and "default" in child:
                value[key] = deepcopy(child["default"])
            if key in value:
                value[key] = with_defaults(value[key], child)
    elif isinstance(value, list) and "items" in schema:
        value[:] = [with_defaults(item, schema["items"]) for item in value]
    elif isinstance(value, float) and schema.get("type") == "integer" and value.is_integer():
        return int(value)  # as kubectl sends it: JSON has one kind of number
    elif isinstance(value, int) and not isinstance(value, bool) and schema.get("type") == "number":
        return float(value)  # CEL compares doubles with doubles
    return value


def unknown_fields(value: Any, schema: Document, path: str = "") -> list[str]:
    """Fields that strict validation refuses."""
    if isinstance(value, list) and "items" in schema:
        return [found for item in value for found in unknown_fields(item, schema["items"], path)]
    if not isinstance(value, dict) or "x-kubernetes-preserve-unknown-fields" in schema or path == ".metadata":
        return []
    known = _known(value, schema)
    found = [f"{path}.{key}: unknown field" for key in value if key not in known]
    for key in value.keys() & known.keys():
        found += unknown_fields(value[key], known[key], f"{path}.{key}")
    return found


def duplicate_keys(value: Any, schema: Document) -> list[str]:
    """Items of keyed lists and of sets that stand twice."""
    if isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys")
        rows = [repr([item.get(key) for key in keys]) for item in value if isinstance(item, dict)] if keys else []
        rows += [repr(item) for item in value] if schema.get("x-kubernetes-list-type") == "set" else []
        return [f"{rows}: duplicate"] if len(set(rows)) < len(rows) else []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return [found for key in value.keys() & known.keys() for found in duplicate_keys(value[key], known[key])]
    return []


def broken_rules(value: Any, schema: Document, path: str = "") -> Iterator[tuple[str, str]]:
    """CEL rules that do not hold; rules about updates are left out."""
    for entry in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in entry["rule"] and not _holds(entry["rule"], json.dumps(value)):
            yield path + entry.get("fieldPath", ""), entry["rule"]
    if isinstance(value, dict):
        known = _known(value, schema)
        for key in value.keys() & known.keys():
            yield from broken_rules(value[key], known[key], f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from broken_rules(item, schema["items"], f"{path}[{index}]")


def refused_changes(old: Document, new: Document) -> list[str]:
    """Paths that an update of one document to another may not change."""
    schema = structural_schema()
    return list(_changes(with_defaults(deepcopy(old), schema), with_defaults(deepcopy(new), schema), schema))


def _changes(old: Document, new: Document, schema: Document, path: str = "") -> Iterator[str]:
    for entry in schema.get("x-kubernetes-validations", ()):
        both = {"self": json_to_cel(new), "oldSelf": json_to_cel(old)}
        if "oldSelf" in entry["rule"] and not _program(entry["rule"]).evaluate(both):
            yield (path + entry.get("fieldPath", "")).lstrip(".")
    for key, child in schema.get("properties", {}).items():
        if "properties" in child and key in old and key in new:
            yield from _changes(old[key], new[key], child, f"{path}.{key}")


@cache
def _holds(rule: str, value: str) -> bool:
    """Takes milliseconds, and most blocks of a table's manifests are alike."""
    return bool(_program(rule).evaluate({"self": json_to_cel(json.loads(value))}))


@cache
def _program(rule: str) -> celpy.Runner:
    return _CEL.program(_CEL.compile(rule))
