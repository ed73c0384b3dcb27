"""What the README and docs/ name exists: tests, files, commands and their options. Their code is run by a test."""

import itertools
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from cormorant_cli.__main__ import without_json
from cormorant_cli.app import app
from cormorant_contract.parsing import parse_job
from cormorant_manifest.reader import load_jobs
from cormorant_testing.snippets import DOCS, PAGES, ROOT, blocks, fences

WIDTHS = {"": 100, "console": 100, "text": 100, "dockerfile": 80, "python": 80, "sh": 80, "yaml": 80}
"""Longest line of a block by its language; there are no other languages."""
RUN_BY = {
    "docs/how-to/multi-agent.md": "tests/peers/test_guides.py",
    "docs/how-to/evaluate.md": "tests/integration/worker/test_evaluations.py",
    "docs/how-to/own-policy.md": "tests/unit/worker/test_policies.py",
    "docs/how-to/migrating-from-torchrl.md": "tests/peers/test_guides.py",
    "docs/how-to/migrating-from-tianshou.md": "tests/peers/test_guides.py",
}
"""The test that runs the Python of a page, if it is not tests/integration/test_snippets.py."""
ROOT_PAGES = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["ROOT_PAGES"]


def test_the_install_says_what_it_downloads() -> None:
    planned = subprocess.run(["make", "-n", "venv"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "installing PyTorch with CUDA, Ray, EnvPool and others: 7 GB on disk" in planned


def test_the_python_of_every_page_is_run() -> None:
    for page in (page for page in PAGES if blocks(page, "python")):
        test = RUN_BY.get(page, "tests/integration/test_snippets.py")
        assert page.rpartition("/")[2] in (ROOT / test).read_text(), f"{test} does not name {page}"


@pytest.mark.parametrize("page", [page for page in (*PAGES, *ROOT_PAGES) if fences(page)])
def test_blocks_have_a_known_language_and_fit_the_page(page: str) -> None:
    lines = [(line, WIDTHS[language]) for language, text in fences(page) for line in text.splitlines()]
    assert [line for line, most in lines if len(line) > most] == []


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block: lines split into words, without comments, prompts and redirections."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def problems(words: list[str]) -> Iterator[str]:
    """What a command names that does not exist."""
    program, *rest = words
    match program:
        case "cormorant" | ".venv/bin/cormorant":
            yield from cormorant_problems(rest)
        case "kubectl" if rest[:2] == ["apply", "-f"]:
            if (ROOT / rest[2]).is_file():
                load_jobs(str(ROOT / rest[2]))
            elif rest[2].startswith("examples/"):
                yield f"{rest[2]} does not exist"
        case "helm" if "charts/cormorant" in rest:
            yield from helm_problems(rest)


def cormorant_problems(words: list[str]) -> Iterator[str]:
    """Parse as the command line does; no command runs."""
    command: Any = typer.main.get_command(app)
    path = "cormorant"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        if name not in command.commands:
            yield f"{path} has no command {name}"
            return
        command, path = command.commands[name], f"{path} {name}"
    try:
        command.make_context(path, without_json(words)[0])
    except Exception as error:  # noqa: BLE001  # typer brings its own click along, whose errors have no public name
        if type(error).__name__ != "Exit":  # --help, --version
            yield f"{path}: {getattr(error, 'message', error)}"


def helm_problems(words: list[str]) -> Iterator[str]:
    schema = json.loads((ROOT / "charts/cormorant/values.schema.json").read_text())
    for flag, value in itertools.pairwise(words):
        if flag != "--set":
            continue
        where: Any = schema
        for key in value.partition("=")[0].split("."):
            if "properties" not in where and where.get("additionalProperties"):
                break
            if key not in where.get("properties", {}):
                yield f"charts/cormorant has no value {value.partition('=')[0]}"
                break
            where = where["properties"][key]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_commands_and_their_options_exist(page: str) -> None:
    shown = [words for block in blocks(page, "sh") for words in commands(block)]
    assert [problem for words in shown for problem in problems(words)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_manifests_are_valid(page: str) -> None:
    documents = [document for block in blocks(page, "yaml") for document in yaml.safe_load_all(block)]
    jobs = [document for document in documents if document.get("kind") == "CollectorJob"]
    assert [parse_job(job).metadata.name for job in jobs] == [job["metadata"]["name"] for job in jobs]


# -- what pages name ------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("page", ["explanation/failures.md", "reference/pods.md"])
PAGE = DOCS / "explanation" / "find-your-way.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]


def read(page: str) -> str:
    return (DOCS / page).read_text()


@BOTH
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = re.findall(r"`(test_\w+)`", read(page))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in written] == []


def tables(text: str, heading: str) -> list[list[str]]:
    """The tables whose first row is `heading`, as lists of rows."""
    found = re.findall(rf"^\| {re.escape(heading)} \|$\n\| --- .*\n((?:\| .*\n)+)", text, re.MULTILINE)
    return [table.splitlines() for table in found]


def test_every_row_of_the_pods_page_names_a_test() -> None:
    (rows,) = tables(read("reference/pods.md"), "event | what happens | test")
    assert len(rows) > 5
    assert [row for row in rows if "`test_" not in row] == []


def test_every_failure_names_a_test() -> None:
    text = read("explanation/failures.md")
    events = [row.split(" | ")[0] for rows in tables(text, "event | what happens") for row in rows]
    tested = [row.split(" | ")[0] for rows in tables(text, "event | tests") for row in rows if "`test_" in row]
    assert len(events) > 80
    assert [event for event in events if tested.count(event) != 1] == []


@pytest.mark.parametrize("row", ROWS, ids=[row.split(" |")[0].removeprefix("| ") for row in ROWS])
def test_every_file_and_name_exists(row: str) -> None:
    words = re.findall(r"`([^`]+)`", row)
    files = [ROOT / word for word in words if "/" in word]
    assert [str(path) for path in files if not path.exists()] == []
    text = "\n".join(path.read_text() for path in files if path.suffix == ".py")
    names = {part for word in words if "/" not in word and " " not in word for part in word.split(".")}
    assert names
    assert [name for name in names if not re.search(rf"^ *((async )?def |class )?{name}\b", text, re.MULTILINE)] == []
