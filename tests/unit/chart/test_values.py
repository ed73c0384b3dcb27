"""values.yaml, values.schema.json and the table in the README say the same, and the templates read these values."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "cormorant"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if schema.get("type") == "object":
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from objects(child, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value and block with its dotted name, but for Helm's own `global`."""
    for name, child in schema["properties"].items():
        if path or name != "global":
            yield f"{path}{name}", child
            if "properties" in child:
                yield from nodes(child, f"{path}{name}.")


LEAVES = {name: node for name, node in nodes(SCHEMA) if "properties" not in node}


def commented(text: str) -> dict[str, str]:
    """The comment above each line of values.yaml, by the dotted name of the value."""
    found: dict[str, str] = {}
    path: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if line.lstrip().startswith("#"):
            words.append(line.lstrip()[2:])
            continue
        if line:
            path = [*path[:depth], line.strip().partition(":")[0]]
            found[".".join(path)] = " ".join(words)
        words = []
    return found


def test_values_schema_and_readme_say_the_same() -> None:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(values, SCHEMA, cls=jsonschema.Draft7Validator)
    assert commented(text) == {name: node["description"] for name, node in nodes(SCHEMA)}
    rows = []
    for name, leaf in LEAVES.items():
        value = values
        for part in name.split("."):
            value = value[part]
        assert value == leaf["default"], name
        words = leaf["description"].replace("|", "\\|")
        assert words.endswith("."), name
        choices = " One of " + ", ".join(f"`{choice}`" for choice in leaf["enum"]) + "." if "enum" in leaf else ""
        rows.append(f"| `{name}` | `{json.dumps(value)}` | {words}{choices} |")
    table = (CHART / "README.md").read_text().partition("| value | default | |\n| --- | --- | --- |\n")[2]
    assert table.splitlines() == rows


def test_every_object_is_closed_or_a_map_of_plain_values() -> None:
    for path, node in objects(SCHEMA):
        if path in (".global", ".affinity"):
            continue  # Helm's own, from a parent chart; Kubernetes' own, which the API server checks
        if "properties" in node:
            assert node["additionalProperties"] is False, path
        else:
            item = node["additionalProperties"]
            choices = item.get("anyOf", [item])
            assert {choice["type"] for choice in choices} <= {"string", "number"}, path


def test_templates_read_every_value_and_no_other() -> None:
    text = "".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))
    read = set(re.findall(r"[.]Values[.]([A-Za-z.]+)", text))
    # Images and spreads are read inside of helpers and ranges, and resources as a whole.
    assert {name for name in LEAVES if not any(f"{name}.".startswith(f"{path}.") for path in read)} == set()
    known = [f"{path[1:]}." for path, _ in objects(SCHEMA)] + [f"{name}." for name in LEAVES]
    assert {path for path in read if f"{path}." not in known} == set()
