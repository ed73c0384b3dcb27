"""How the repository is laid out, and what may be imported where. import-linter keeps the rest (`make check`)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_MODULE = 600
ROOMS = ("api", "worker", "operator", "benchmarks", "tests", "examples")


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a statement leaves in sys.modules of a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("folder", ["operator", "worker", "api"])
def test_rooms_are_folders_and_never_packages(folder: str) -> None:
    # An operator/__init__.py would shadow the standard library.
    assert not (ROOT / folder / "__init__.py").exists()


def test_tests_are_no_packages() -> None:
    found = [path for path in (ROOT / "tests").rglob("__init__.py") if "support" not in path.parts]
    assert found == []


def test_no_module_is_longer_than_it_may_be() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import cormorant_worker",
        "import cormorant_worker.envs.child",
        "import cormorant_worker.envs.inline",
        "import cormorant_contract.job",
        "import cormorant_manifest.reader",
    ],
)
def test_what_starts_often_or_on_laptops_starts_without_torch(statement: str) -> None:
    assert not imported_by(statement) & {"torch", "tensordict", "ray", "envpool", "pyarrow"}


def test_one_module_knows_how_ray_is_started() -> None:
    knowing = [path.name for path in sources() if "--node-manager-port" in path.read_text()]
    assert [name for name in knowing if not name.startswith("test_")] == ["ray_command.py"]


def test_the_contract_needs_pydantic_only() -> None:
    assert not imported_by("import cormorant_contract.job") & {"yaml", "numpy", "gymnasium", "typer", "rich"}


def test_worker_processes_start_without_tensordict() -> None:
    # It takes seconds to import, and workers hand over blocks.
    statement = "import cormorant_worker.fleet.local.worker_main, cormorant.policies"
    assert not imported_by(statement) & {"tensordict", "pyarrow", "ray"}


def test_the_operator_is_small_and_its_decision_needs_nothing() -> None:
    heavy = {"torch", "ray", "numpy", "tensordict", "yaml", "fastapi"}
    assert not imported_by("import cormorant_operator.__main__") & (heavy - {"yaml"})
    assert not imported_by("import cormorant_operator.decide.reconcile") & (heavy | {"kopf", "aiohttp", "structlog"})


def test_modules_say_what_they_are_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for room in ("api", "worker", "operator")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.read_text().lstrip().startswith('"""')
    ]
    assert silent == []


def test_there_are_no_drawers_for_odds_and_ends() -> None:
    drawers = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert [str(path.relative_to(ROOT)) for path in sources() if path.name in drawers] == []
