"""Code in the README and in docs/ is run by a test; commands for a cluster are checked here without one."""

import ast
import runpy
import subprocess

import pytest
import yaml

from cormorant_contract.parsing import parse_job
from cormorant_testing.snippets import PAGES, ROOT, blocks, commands, fences, problem_of

LANGUAGES = {"", "console", "dockerfile", "python", "sh", "text", "yaml"}
RUN_BY = {
    "docs/how-to/multi-agent.md": "tests/peers/test_multi_agent.py",
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


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_known_language(page: str) -> None:
    assert {language for language, _ in fences(page)} <= LANGUAGES


def test_the_python_of_every_page_is_run() -> None:
    for page in (page for page in PAGES if blocks(page, "python")):
        test = RUN_BY.get(page, "tests/integration/test_snippets.py")
        assert page.rpartition("/")[2] in (ROOT / test).read_text(), f"{test} does not name {page}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_compiles(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.parametrize("page", [page for page in (*PAGES, *ROOT_PAGES) if fences(page)])
def test_blocks_fit_the_page(page: str) -> None:
    width = dict.fromkeys(("dockerfile", "python", "sh", "yaml"), 80)
    lines = [(line, width.get(language, 100)) for language, text in fences(page) for line in text.splitlines()]
    assert [line for line, most in lines if len(line) > most] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_commands_and_their_options_exist(page: str) -> None:
    shown = [words for block in blocks(page, "sh") for words in commands(block)]
    assert [problem for words in shown if (problem := problem_of(words))] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_manifests_are_valid(page: str) -> None:
    documents = [document for block in blocks(page, "yaml") for document in yaml.safe_load_all(block)]
    jobs = [document for document in documents if document.get("kind") == "CollectorJob"]
    assert [parse_job(job).metadata.name for job in jobs] == [job["metadata"]["name"] for job in jobs]
