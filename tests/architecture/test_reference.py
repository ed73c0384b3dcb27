"""Users import `cormorant`, and what they read imports nothing else of ours. Its reference has every public name, with
types and an example, and a type checker accepts them.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import cormorant
from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import PAGES, ROOT, blocks

PAGE = "docs/reference/python.md"
GUIDES = {"torchrl": "docs/how-to/migrating-from-torchrl.md", "tianshou": "docs/how-to/migrating-from-tianshou.md"}
MODULES = ["cormorant", *(f"cormorant.{name}" for name in sorted({*dir(cormorant)} - {*cormorant.__all__}))]
NAMES = [(module, name) for module in MODULES for name in import_module(module).__all__]
SHOWN = re.findall(r"^::: ([\w.]+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
EXAMPLES = "\n".join(blocks(PAGE, "python"))
ELSEWHERE = {"Batch"}
"""Another project's class, which a sentence of the page names."""


OURS = re.compile(r"cormorant_[a-z]+")


def shown(path: str) -> Any:
    """What a line `::: path` of the page documents: an object, or all that a module has."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name, None) or import_module(path)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(both) for both in NAMES])
def test_the_page_has_every_public_name_and_an_example(module: str, name: str) -> None:
    thing = getattr(import_module(module), name)
    documented = [shown(path) for path in SHOWN]
    is_shown = any(thing is one or thing.__module__ == getattr(one, "__name__", "") for one in documented)
    assert name in ELSEWHERE or is_shown
    texts = [EXAMPLES, *re.findall(r"^ {4,}.*$", thing.__doc__ or "", re.MULTILINE)]
    if guide := GUIDES.get(module.rpartition(".")[2]):
        texts.append((ROOT / guide).read_text())
    assert any(re.search(rf"\b{name}\b", text) for text in texts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "basedpyright"])
def test_type_checkers_accept_the_examples(checker: str, tmp_path: Path) -> None:
    script = tmp_path / "reference.py"
    script.write_text(EXAMPLES)
    pyright = tmp_path / "pyright.json"
    paths = [str(ROOT / folder) for folder in ("api", "worker", "operator")]
    pyright.write_text(json.dumps({"typeCheckingMode": "standard", "include": [str(script)], "extraPaths": paths}))
    arguments = {
        "mypy": ["--config-file", "pyproject.toml", str(script)],
        "basedpyright": ["--project", str(pyright), "--pythonpath", sys.executable],
    }[checker]
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_type_checkers_read_the_installed_packages() -> None:
    things = [getattr(import_module(module), name) for module, name in NAMES]
    rooms = {getattr(thing, "__module__", "").partition(".")[0] for thing in things}
    ours = {room for room in rooms if room.startswith("cormorant")}
    assert len(ours) == 6
    assert [room for room in ours if not Path(str(import_module(room).__file__)).with_name("py.typed").is_file()] == []


WRONG = {
    "import cormorant\n\n\ndef f(fleet: cormorant.Fleet) -> None:\n    fleet.publish(7)\n":
        'Argument 1 to "publish" of "Fleet" has incompatible type "int"',
    "import cormorant\n\ncormorant.open_fleet(env=7)\n":
        'Argument "env" to "open_fleet" has incompatible type "int"',
    "from cormorant.torchrl import Collector\n\nCollector(print, frames_per_batch=8, total_frame=8)\n":
        'Unexpected keyword argument "total_frame" for "Collector"',
    "from cormorant.torchrl import RayCollector\n\nRayCollector(print, frames_per_batch=8, replay_buffer=8)\n":
        'Argument "replay_buffer" to "RayCollector" has incompatible type "int"',
    "from cormorant.tianshou import Collector\n\nCollector(8, [print])\n":
        'Argument 1 to "Collector" has incompatible type "int"',
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script_text", WRONG)
def test_a_type_checker_refuses_wrong_arguments(script_text: str, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(script_text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert WRONG[script_text] in done.stdout


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(both) for both in NAMES])
def test_keyword_arguments_of_public_functions_have_names(module: str, name: str) -> None:
    thing = getattr(import_module(module), name)
    made = thing.__init__ if isinstance(thing, type) else thing
    is_ours = inspect.isfunction(made) and made.__module__.startswith("cormorant")
    given = inspect.signature(made).parameters.values() if is_ours else ()
    assert [str(each) for each in given if each.kind is each.VAR_KEYWORD and each.annotation in (Any, "Any")] == []


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


def imported(code: str) -> set[str]:
    """Packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_pages_and_examples_import_one_package_of_ours() -> None:
    pages = [page for page in PAGES if not page.startswith("docs/decisions")]
    texts = {page: blocks(page, "python") for page in pages}
    texts |= {path.name: [path.read_text()] for path in (ROOT / "examples").rglob("*.py")}
    found = {
        name: {one for text in parts for one in imported(text) if OURS.match(one)} for name, parts in texts.items()
    }
    assert {name: ours for name, ours in found.items() if ours} == {}
    for path in (ROOT / "examples").glob("*.yaml"):
        assert not re.findall(r"entrypoint:\s*\"?cormorant_", path.read_text()), path.name
