"""The chart's values: one source, closed, and committed as it is generated."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cormorant_cli.commands.crd import crd_yaml
from cormorant_contract.chart.files import readme_text
from cormorant_contract.chart.schema import leaves, values_schema
from cormorant_contract.chart.values import Values

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "cormorant"
GENERATE = [sys.executable, "-m", "cormorant_contract.chart"]


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if schema.get("type") == "object":
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from objects(child, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def test_committed_files_are_the_generated_ones() -> None:
    done = subprocess.run([*GENERATE, str(CHART), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (CHART / "files" / "crds" / "collectorjobs.yaml").read_text() == crd_yaml()


def test_stale_file_is_named(tmp_path: Path) -> None:
    for name in ("values.yaml", "values.schema.json", "README.md"):
        (tmp_path / name).write_text((CHART / name).read_text())
    (tmp_path / "values.yaml").write_text("replicas: 7\n")
    check = subprocess.run([*GENERATE, str(tmp_path), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert check.returncode == 1
    assert check.stderr == f"{tmp_path / 'values.yaml'} is out of date; run make docs\n"
    subprocess.run([*GENERATE, str(tmp_path)], check=True, cwd=ROOT)
    assert (tmp_path / "values.yaml").read_text() == (CHART / "values.yaml").read_text()


def test_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        readme_text("# Chart\n")


def test_defaults_of_the_file_are_those_of_the_models() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values == Values().to_document()
    jsonschema.Draft7Validator.check_schema(values_schema())
    jsonschema.validate(values, values_schema(), cls=jsonschema.Draft7Validator)


def test_every_object_is_closed_or_a_map_of_plain_values() -> None:
    for path, node in objects(values_schema()):
        if path == ".global":
            continue  # Helm's own, from a parent chart
        if "properties" in node:
            assert node["additionalProperties"] is False, path
        else:
            item = node["additionalProperties"]
            choices = item.get("anyOf", [item])
            assert {choice["type"] for choice in choices} <= {"string", "number"}, path


def test_every_value_has_a_default_and_words() -> None:
    for name, leaf in leaves(values_schema()):
        assert leaf["description"].endswith("."), name
        assert "default" in leaf, name


def test_templates_read_every_value_and_no_other() -> None:
    text = "".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))
    read = set(re.findall(r"[.]Values[.]([A-Za-z.]+)", text))
    # Images and spreads are read inside of helpers and ranges, and resources as a whole.
    assert {name for name, _ in leaves(values_schema()) if not any(covers(path, name) for path in read)} == set()
    known = [f"{path[1:]}." for path, _ in objects(values_schema())] + [f"{n}." for n, _ in leaves(values_schema())]
    assert {path for path in read if f"{path}." not in known} == set()


def covers(path: str, name: str) -> bool:
    return f"{name}.".startswith(f"{path}.")


def test_version_is_the_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]
