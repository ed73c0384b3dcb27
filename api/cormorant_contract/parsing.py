"""Parses a loaded document into a CollectorJob, or into a list of all its problems, in sentences: the value, why it is
refused, what to write instead.

Called by all that read a manifest: the command line, the worker, the operator. The result is the API server's with the
CRD: strict types, unknown fields refused, a null counted as an absent field.
"""

import json
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
    "string": "a string; quote it",
    "float": "a number",
    "model": "an object",
    "dict": "an object",
    "tuple": "a list",
}


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
        try:
            return CollectorJob.model_validate(prune(document, structural_schema()), by_alias=True, by_name=False)
        except ValidationError as error:
            findings = list(_sentences(error, structural_schema()))
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
    if not isinstance(document, dict):
        yield (), f"the document is not an object; a manifest begins with apiVersion: {API_VERSION} and kind: {KIND}"
        return
    for field, wanted in (("kind", KIND), ("apiVersion", API_VERSION)):
        if (found := document.get(field)) != wanted:
            what = "is missing" if found is None else f"{_brief(found)} is not supported"
            yield (field,), f"{what}; write {field}: {wanted}"
            return


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
        # Said better: lists count only valid items.
        if kind == "too_short" and isinstance(value, list) and len(value) >= context["min_length"]:
            continue
        if kind == "rules":
            for path, sentence in context["violations"]:
                yield (*location, *path), sentence
        else:
            yield location, _sentence(kind, value, location, context, schema, details["msg"])


def _brief(value: object) -> str:
    """Write a value as the manifest would, short enough for one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= _BRIEF_LENGTH else f"{text[: _BRIEF_LENGTH - 3]}..."


def _sentence(
    kind: str, value: object, location: tuple[Any, ...], context: dict[str, Any], schema: Schema, msg: str
) -> str:
    field = _find(schema, location)
    if kind == "missing":
        words = f": {field['description'].split('. ')[0].rstrip('.')}" if "description" in field else ""
        return f"is missing; add it{words}"
    if kind == "extra_forbidden":
        known = list(_find(schema, location[:-1]).get("properties", {}))
        otherwise = f"; valid fields: {', '.join(known)}" if known else "; no fields are allowed here, write {}"
        name = str(location[-1]).replace("_", "").replace("-", "")
        return f"unknown field{did_you_mean(name, known, most=1, otherwise=otherwise)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound, word = (context["ge"], "less") if kind == "greater_than_equal" else (context["le"], "greater")
        to = f"to {field['maximum']}" if "maximum" in field else "up"
        return f"{_brief(value)} is {word} than {bound}; write a number from {field['minimum']} {to}"
    if kind == "string_pattern_mismatch":
        return f"{_brief(value)} is not valid; write {PATTERN_WORDS[context['pattern']]}"
    if kind == "lossy":
        return msg
    if wanted := _WANTED.get(kind.removesuffix("_from_float").removesuffix("_type").removesuffix("_parsing")):
        return f"{_brief(value)} is not {wanted}"
    words = msg.replace("Input should be", "must be").replace("String should", "must").replace("Tuple should", "must")
    return f"{_brief(value)}{' ' if words.startswith('must') else ': '}{words}"


def _find(schema: Schema, location: Sequence[str | int]) -> Schema:
    for part in location:
        fields = schema.get("properties", {})
        child = schema.get("items") if isinstance(part, int) else fields.get(part, schema.get("additionalProperties"))
        schema = child if child is not None else {}
    return schema
