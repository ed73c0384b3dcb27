"""pydantic's errors as sentences for users: the value, why it is refused, what to write instead."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from cormorant_contract.base import PATTERN_WORDS
from cormorant_contract.schema import Schema

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


def sentences(error: ValidationError, schema: Schema) -> Iterator[tuple[tuple[str | int, ...], str]]:
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


def brief(value: object) -> str:
    """Write a value as the manifest would, short enough for one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= _BRIEF_LENGTH else f"{text[: _BRIEF_LENGTH - 3]}..."


def kind_of(value: object) -> str:
    """Say what kind of value it is, in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for types, words in (((int, float), "a number"), (str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, types):
            return words
    return f"a {type(value).__name__}"


def did_you_mean(name: str, known: Iterable[str], *, most: int = 3, otherwise: str = "", cutoff: float = 0.6) -> str:
    """End of a sentence about an unknown name; `otherwise` if no known name resembles it, ignoring case."""
    folded = {candidate.lower(): candidate for candidate in known}
    found = [folded[match] for match in get_close_matches(name.lower(), folded, n=most, cutoff=cutoff)]
    return f"; did you mean {' or '.join(found)}?" if found else otherwise


def nearest(name: str, known: Sequence[str]) -> str:
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
        return f"unknown field{nearest(str(location[-1]), siblings)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound, word = (context["ge"], "less") if kind == "greater_than_equal" else (context["le"], "greater")
        to = f"to {field['maximum']}" if "maximum" in field else "up"
        return f"{brief(value)} is {word} than {bound}; write a number from {field['minimum']} {to}"
    if kind == "literal_error":
        known = [str(name) for name in field.get("enum", ())]
        return f"{brief(value)} is not one of {', '.join(known)}{did_you_mean(str(value), known, most=1)}"
    if kind == "string_pattern_mismatch":
        return f"{brief(value)} is not valid; write {PATTERN_WORDS[context['pattern']]}"
    if kind == "string_too_short":
        return "is empty; write something or leave the field out" if value == "" else f"{brief(value)} is too short"
    if kind == "string_too_long":
        length = len(value) if isinstance(value, str) else 0
        return f"{brief(value)} has {length} characters; write at most {context['max_length']}"
    if kind == "lossy":
        return msg
    if kind in ("too_long", "too_short"):
        limit = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"has {context['actual_length']} items; write {limit}"
    if kind == "int_from_float" or (kind == "int_type" and isinstance(value, float)):
        return f"{brief(value)} is not an integer; write a whole number"
    wanted = _WANTED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if wanted is None:
        is_time = "datetime" in kind or "timezone" in kind
        return f"{brief(value)} is not {_WANTED['time']}; quote it" if is_time else f"{brief(value)}: {msg}"
    sentence = f"{brief(value)} is {kind_of(value)}, not {wanted}"
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
