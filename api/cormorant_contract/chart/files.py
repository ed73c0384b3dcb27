"""The chart's generated files as text: values.yaml, values.schema.json, the table in its README."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from cormorant_contract.chart.schema import leaves, values_schema
from cormorant_contract.schema import Schema

TABLE_BEGIN, TABLE_END = "<!-- values: generated -->", "<!-- end of values -->"
_HEADER = """# Generated from cormorant_contract.chart (make docs): change the models there.
# Override values with --set or --values.
"""
_WIDTH = 110


def schema_text() -> str:
    """values.schema.json."""
    return json.dumps(values_schema(), indent=2, ensure_ascii=False) + "\n"


def values_text() -> str:
    """values.yaml: every value with its default, its description above it."""
    return _HEADER + "\n".join(_yaml(values_schema(), indent="")) + "\n"


def readme_text(readme: str) -> str:
    """A README whose table of values is the one of the schema.

    Raises:
        ValueError: the README lacks the table's markers.
    """
    before, begin, rest = readme.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not (begin and end):
        raise ValueError(f"the README has no lines {TABLE_BEGIN} and {TABLE_END}")
    return f"{before}{begin}\n{_table()}{end}{after}"


def _table() -> str:
    rows = ["| value | default | |", "| --- | --- | --- |"]
    for name, leaf in leaves(values_schema()):
        # A bar ends a cell, also between backticks.
        words = leaf["description"].replace("|", "\\|")
        rows.append(f"| `{name}` | `{_flow(leaf['default'])}` | {words}{_choices(leaf)} |")
    return "\n".join(rows) + "\n"


def _choices(leaf: Schema) -> str:
    return " One of " + ", ".join(f"`{choice}`" for choice in leaf["enum"]) + "." if "enum" in leaf else ""


def _yaml(schema: Schema, *, indent: str) -> Iterator[str]:
    for name, child in schema["properties"].items():
        if not indent:
            if name == "global":
                continue
            yield ""
        words = textwrap.wrap(child["description"], _WIDTH - len(indent) - 2)
        yield from (f"{indent}# {line}" for line in words)
        if "properties" in child:
            yield f"{indent}{name}:"
            yield from _yaml(child, indent=f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(child['default'])}"


def _flow(value: Any) -> str:
    """A value on one line, as YAML in flow style; strings stay in quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
