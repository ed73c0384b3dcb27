"""Users import `cormorant`: it has what it names, and whatever they read imports nothing else of ours."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import cormorant
from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import PAGES, ROOT, blocks

OURS = re.compile(r"cormorant_[a-z]+")
MODULES = sorted(path.stem for path in (ROOT / "api" / "cormorant").glob("*.py"))


def examples() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.py"))


def imported(code: str) -> set[str]:
    """Packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_what_it_names(name: str) -> None:
    module = import_module("cormorant" if name == "__init__" else f"cormorant.{name}")
    assert all(getattr(module, entry).__module__.startswith(("cormorant", "tensordict")) for entry in module.__all__)


def test_what_does_not_exist_is_said_in_a_sentence() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'cormorant' has no attribute 'open_flet'; it has Batch, Batches, Client,"
    ):
        _ = cormorant.open_flet


@pytest.mark.parametrize(
    ("statement", "missing", "extra"),
    [
        ("from cormorant import open_fleet", "cloudpickle", "worker"),
        ("from cormorant import connect", "numpy", "client"),
        ("from cormorant.policies import mlp", "gymnasium", "worker"),
        ("from cormorant.torchrl import Collector", "torch", "worker"),
    ],
)
def test_a_missing_library_names_its_extra(statement: str, missing: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; {statement}"
    done = run_script(code)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: this part of cormorant needs {missing}, which is not installed: pip install 'cormorant[{extra}]'"
    )


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_examples_import_one_package_of_ours(path: Path) -> None:
    assert not [name for name in imported(path.read_text()) if OURS.match(name)]


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/decisions")])
def test_pages_import_one_package_of_ours(page: str) -> None:
    assert not [name for text in blocks(page, "python") for name in imported(text) if OURS.match(name)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_name_policies_by_that_package(path: Path) -> None:
    assert not re.findall(r"entrypoint:\s*\"?cormorant_", path.read_text())
