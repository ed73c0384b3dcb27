"""A stand-in for the API server: the CRD's schema and CEL rules on a document, without a cluster."""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import celpy
import jsonschema
from celpy.adapter import json_to_cel

from cormorant_contract.schema import structural_schema

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
