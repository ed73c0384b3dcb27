"""Parses a loaded document into a CollectorJob, or into a list of all its problems, in sentences: the value, why it is
refused, what to write instead.

Called by all that read a manifest: the command line, the worker, the operator. The result is the API server's with the
CRD: strict types, unknown fields refused, a null counted as an absent field.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from cormorant_contract.base import PATTERN_WORDS
from cormorant_contract.errors import ManifestError, Problem, did_you_mean
from cormorant_contract.job import API_VERSION, KIND, CollectorJob
from cormorant_contract.schema import Schema, structural_schema

Location = tuple[str | int, ...]
Finding = tuple[Location, str]
_BRIEF_LENGTH = 60
_WANTED = {
    "int": "an integer",
    "bool": "true or false",
    "string": "a string",
    "float": "a number",
    "model": "an object",
    "dict": "an object",
    "tuple": "a list",
    "time": "a time like 2026-01-31T12:00:00Z",
}
_UNQUOTED = re.compile(r"[-+]?\d+(\.\d*)?|true|false")
"""Texts that are numbers or booleans unless quoted."""

_METADATA_FIELDS = (
    "name", "namespace", "labels", "annotations", "generateName", "uid", "resourceVersion", "generation",
    "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
    "managedFields", "selfLink",
)  # fmt: skip


def parse_job(document: object, source: str = "", *, position: int = 1) -> CollectorJob:
    """Make a CollectorJob from the result of a YAML or JSON reader.

    Args:
        source: File name as the user wrote it, with which problems begin.
        position: Position of the document in the source, from 1.

    Raises:
        ManifestError: With every problem found, not only the first.
    """
    findings = list(_refuse_kind(document))
    if not findings:
        assert isinstance(document, dict)
        findings = list(_refuse_values(document, ()))
        pruned = prune(document, structural_schema())
        metadata = pruned.get("metadata")
        findings += [
            # A fixed set in Kubernetes, though the model keeps what newer servers add.
            (("metadata", key), f"unknown field{_nearest(key, _METADATA_FIELDS)}")
            for key in (metadata if isinstance(metadata, dict) else ())
            if isinstance(key, str) and key not in _METADATA_FIELDS
        ]
        try:
            job = CollectorJob.model_validate(pruned, by_alias=True, by_name=False)
        except ValidationError as error:
            known = [location for location, _ in findings]
            findings += [
                (location, sentence)
                for location, sentence in _sentences(error, structural_schema())
                if not any(reported[: len(location)] == location for reported in known)
            ]
        else:
            if not findings:
                return job
    name = name_of(document)
    raise ManifestError(
        [
            Problem(message=sentence, source=source, document=position, name=name, location=location)
            for location, sentence in findings
        ]
    )


def name_of(document: object) -> str:
    """metadata.name of a document, if it has one, for messages."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _refuse_kind(document: object) -> Iterator[Finding]:
    if document is None:
        yield (), f"the document is empty; a manifest begins with apiVersion: {API_VERSION} and kind: {KIND}"
    elif not isinstance(document, dict):
        yield (), f"the document is {_kind_of(document)}, not a manifest; write apiVersion: {API_VERSION}, kind: {KIND}"
    elif document.get("kind") is None:
        yield ("kind",), f"is missing; add kind: {KIND}"
    elif document["kind"] != KIND:
        kind = str(document["kind"])
        near = " (case-sensitive)" if kind.lower() == KIND.lower() else ""
        remedy = did_you_mean(kind, [KIND], otherwise="; this command accepts only CollectorJobs")
        yield ("kind",), f"{_brief(document['kind'])} is not {KIND}{near}{remedy}"
    elif document.get("apiVersion") is None:
        yield ("apiVersion",), f"is missing; add apiVersion: {API_VERSION}"
    elif document["apiVersion"] != API_VERSION:
        yield ("apiVersion",), f"{_brief(document['apiVersion'])} is not supported; write apiVersion: {API_VERSION}"


def _refuse_values(value: object, location: Location) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _refuse_values(item, (*location, key))
            else:
                yield (*location, str(key)), f"the key is {_kind_of(key)}, not a string; quote it"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _refuse_values(item, (*location, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield location, f"{value} is not a finite number; write a finite one"
    elif not isinstance(value, (str, int, float, type(None))):
        remedy = "pass int(...) of it" if hasattr(value, "__index__") else "quote it to make it a string"
        yield location, f"{type(value).__name__} is not allowed in a manifest; {remedy}"


def prune(value: Any, schema: Schema, *, path: str = "", unknown: list[str] | None = None) -> Any:
    """Drop null fields that the schema knows, as the API server does: `dataset:` with nothing after it is absent.
    `unknown`: if given, fields that the schema does not know are also dropped, and their paths appended to it.
    """
    if isinstance(value, dict) and "additionalProperties" in schema:
        schema = {"properties": dict.fromkeys(value, schema["additionalProperties"])}
    if isinstance(value, dict) and "properties" in schema:
        known: Schema = schema["properties"]
        if unknown is not None:
            unknown += (f"{path}.{key}" for key in value if key not in known)
        return {
            key: prune(item, known.get(key, {}), path=f"{path}.{key}", unknown=unknown)
            for key, item in value.items()
            if (item is not None if key in known else unknown is None)
        }
    if isinstance(value, list) and "items" in schema:
        return [
            prune(item, schema["items"], path=f"{path}[{index}]", unknown=unknown) for index, item in enumerate(value)
        ]
    return value


def _sentences(error: ValidationError, schema: Schema) -> Iterator[Finding]:
    """Turn a validation error into locations and sentences, one per broken rule."""
    for details in error.errors(include_url=False):
        location = details["loc"]
        kind, value, context = details["type"], details["input"], details.get("ctx", {})
        # What was said better: lists count only valid items, and parsing checks keys.
        is_short_of_valid = kind == "too_short" and isinstance(value, list) and len(value) >= context["min_length"]
        if is_short_of_valid or location[-1:] == ("[key]",):
            continue
        if kind == "rules":
            for path, sentence in context["violations"]:
                yield (*location, *path), sentence
        else:
            yield location, _sentence(kind, value, location, context, schema, details["msg"])


def _brief(value: object) -> str:
    """Write a value as the manifest would, short enough for one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= _BRIEF_LENGTH else f"{text[: _BRIEF_LENGTH - 3]}..."


def _kind_of(value: object) -> str:
    """Say what kind of value it is, in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for types, words in (((int, float), "a number"), (str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, types):
            return words
    return f"a {type(value).__name__}"


def _nearest(name: str, known: Sequence[str]) -> str:
    """Write the remedy for an unknown field: the nearest known field, or all of them."""
    otherwise = f"; valid fields: {', '.join(known)}" if known else "; no fields are allowed here, write {}"
    return did_you_mean(name.replace("_", "").replace("-", ""), known, most=1, otherwise=otherwise)


def _sentence(
    kind: str, value: object, location: tuple[Any, ...], context: dict[str, Any], schema: Schema, msg: str
) -> str:
    field = _find(schema, location)
    if kind == "missing":
        words = f": {field['description'].split('. ')[0].rstrip('.')}" if "description" in field else ""
        return f"is missing; add it{words}"
    if kind == "extra_forbidden":
        siblings = list(_find(schema, location[:-1]).get("properties", {}))
        return f"unknown field{_nearest(str(location[-1]), siblings)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound, word = (context["ge"], "less") if kind == "greater_than_equal" else (context["le"], "greater")
        to = f"to {field['maximum']}" if "maximum" in field else "up"
        return f"{_brief(value)} is {word} than {bound}; write a number from {field['minimum']} {to}"
    if kind == "literal_error":
        known = [str(name) for name in field.get("enum", ())]
        return f"{_brief(value)} is not one of {', '.join(known)}{did_you_mean(str(value), known, most=1)}"
    if kind == "string_pattern_mismatch":
        return f"{_brief(value)} is not valid; write {PATTERN_WORDS[context['pattern']]}"
    if kind == "string_too_short":
        return "is empty; write something or leave the field out" if value == "" else f"{_brief(value)} is too short"
    if kind == "string_too_long":
        length = len(value) if isinstance(value, str) else 0
        return f"{_brief(value)} has {length} characters; write at most {context['max_length']}"
    if kind == "lossy":
        return msg
    if kind in ("too_long", "too_short"):
        limit = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"has {context['actual_length']} items; write {limit}"
    if kind == "int_from_float" or (kind == "int_type" and isinstance(value, float)):
        return f"{_brief(value)} is not an integer; write a whole number"
    wanted = _WANTED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if wanted is None:
        is_time = "datetime" in kind or "timezone" in kind
        return f"{_brief(value)} is not {_WANTED['time']}; quote it" if is_time else f"{_brief(value)}: {msg}"
    sentence = f"{_brief(value)} is {_kind_of(value)}, not {wanted}"
    if wanted == "a string" and not isinstance(value, (list, dict)):
        return f"{sentence}; quote it"
    if isinstance(value, str) and wanted in ("an integer", "a number", "true or false") and _UNQUOTED.fullmatch(value):
        return f"{sentence}; write it without quotes"
    return f"{sentence}; write {wanted}"


def _find(schema: Schema, location: Sequence[str | int]) -> Schema:
    for part in location:
        fields = schema.get("properties", {})
        child = schema.get("items") if isinstance(part, int) else fields.get(part, schema.get("additionalProperties"))
        schema = child if child is not None else {}
    return schema
