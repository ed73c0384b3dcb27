"""values.schema.json, which Helm validates values with. Closed at every level, so that a typo is an error."""

from collections.abc import Iterator

from cormorant_contract.base import in_json_schema_words
from cormorant_contract.chart.values import Values
from cormorant_contract.schema import Schema, resolved

_LEFT_OUT = ("title", "$defs", "format")


def values_schema() -> Schema:
    """The JSON schema of the chart's values, as plain data."""
    raw = in_json_schema_words(Values.model_json_schema(by_alias=True))
    root = _inline(raw, raw["$defs"])
    # Helm passes shared values to subcharts.
    shared = {"type": "object", "description": "Values shared with a parent chart; ignored."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart cormorant",
        **root,
        "properties": {**root["properties"], "global": shared},
    }


def leaves(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every value that can be set on its own, with its dotted name, in the order of the models."""
    for name, child in schema["properties"].items():
        if path == "" and name == "global":
            continue
        if "properties" in child:
            yield from leaves(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def _inline(node: Schema, definitions: Schema) -> Schema:
    """Resolve references and optional unions of a node and its descendants."""
    node = resolved(node, definitions)
    result: Schema = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: _inline(child, definitions) for name, child in value.items()}
        elif key == "anyOf":
            result[key] = [_inline(choice, definitions) for choice in value]
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _inline(value, definitions)
        elif key == "description":
            result[key] = " ".join(value.split())
        elif key not in _LEFT_OUT:
            result[key] = value
    if "properties" in result:
        # Its parts have defaults of their own.
        result.pop("default", None)
    return result
