"""Fenced blocks of the README and of the documentation, and what the commands in them must name."""

import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cormorant_manifest.reader import load_jobs

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FREE = {"cd", "curl", "export", "git", "kind", "pytest", "benchmarks/peers/setup"}
"""Programs whose arguments nobody checks."""


def fences(page: str) -> list[tuple[str, str]]:
    """Language and text of each block, in order."""
    return _FENCE.findall((ROOT / page).read_text())


def blocks(page: str, language: str) -> list[str]:
    return [text for found, text in fences(page) if found == language]


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block: lines split into words, without comments, prompts and redirections."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def problem_of(words: list[str]) -> str:
    """What a command names that does not exist; empty: nothing."""
    program, *rest = words
    if "=" in program or program in _FREE or "|" in rest:
        return ""
    if program == "cormorant" or program == ".venv/bin/cormorant":
        return cormorant_problem(rest)
    if program in ("kubectl", "helm", "docker", "make", "python"):
        return "; ".join(_PROBLEMS[program](rest))
    return f"{program} is not known to tests/support/cormorant_testing/snippets.py"


def cormorant_problem(words: list[str]) -> str:
    """Parse as the command line does; no command runs."""
    import typer  # which the environment of tests/peers lacks

    from cormorant_cli.app import app

    command: Any = typer.main.get_command(app)
    path = "cormorant"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        if name not in command.commands:
            return f"{path} has no command {name}"
        command, path = command.commands[name], f"{path} {name}"
    try:
        command.make_context(path, list(words))
    except Exception as error:  # noqa: BLE001  # typer brings its own click along, whose errors have no public name
        if type(error).__name__ == "Exit":  # --help, --version
            return ""
        return f"{path}: {getattr(error, 'message', error)}"
    return ""


def _kubectl(words: list[str]) -> Iterator[str]:
    if words[:1] == ["apply"] and words[1] == "-f":
        if (ROOT / words[2]).is_file():
            load_jobs(str(ROOT / words[2]))
        elif words[2].startswith("examples/"):
            yield f"{words[2]} does not exist"


def _helm(words: list[str]) -> Iterator[str]:
    if "charts/cormorant" not in words:
        return
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


def _docker(words: list[str]) -> Iterator[str]:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for flag, value in itertools.pairwise(words):
        if flag == "--target" and f" AS {value}\n" not in dockerfile:
            yield f"the Dockerfile has no target {value}"
        if flag == "--build-arg" and f"ARG {value.partition('=')[0]}" not in dockerfile:
            yield f"the Dockerfile has no argument {value}"


def _make(words: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        if "=" not in word and not re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE):
            yield f"the Makefile has no target {word}"


def _python(words: list[str]) -> Iterator[str]:
    if words[:1] == ["-m"]:
        if importlib.util.find_spec(words[1]) is None:
            yield f"there is no module {words[1]}"
    elif words[0].endswith(".py") and not (ROOT / words[0]).is_file():
        yield f"{words[0]} does not exist"


_PROBLEMS = {"kubectl": _kubectl, "helm": _helm, "docker": _docker, "make": _make, "python": _python}
