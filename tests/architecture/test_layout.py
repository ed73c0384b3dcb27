"""How the repository is laid out, and what may be imported where; import-linter keeps the rest (`make check`). One
word, one idea: a public class name exists once unless a reason is listed.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from cormorant_testing.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
LONGEST_MODULE = 600
PRODUCT = ("api", "worker", "operator")
ROOMS = (*PRODUCT, "benchmarks", "tests", "examples")
REASONS = Path(__file__).with_name("class_names.txt")


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms or ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_rooms_and_tests_are_folders_and_never_packages() -> None:
    # An operator/__init__.py would shadow the standard library.
    assert not [room for room in ("operator", "worker", "api") if (ROOT / room / "__init__.py").exists()]
    assert not [path for path in (ROOT / "tests").rglob("__init__.py") if "support" not in path.parts]


def test_no_module_is_longer_than_it_may_be() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


LIBRARIES = {"torch", "tensordict", "ray", "envpool", "pyarrow", "gymnasium", "numpy", "kubernetes", "fastapi"}


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import cormorant", LIBRARIES | {"pydantic"}),
        ("import cormorant_worker", LIBRARIES | {"yaml", "pydantic"}),
        # What starts often: beside every worker, and for every environment.
        ("import cormorant_worker.supervisor.__main__", LIBRARIES | {"pydantic"}),
        ("import cormorant_worker.envs.child", (LIBRARIES - {"numpy", "gymnasium"}) | {"structlog", "pydantic"}),
        ("import cormorant_worker.envs.single_envs", {"torch", "tensordict", "ray", "envpool", "pyarrow"}),
        # It takes seconds to import, and workers hand over blocks.
        ("import cormorant_worker.fleet.local.worker_main, cormorant.policies", {"tensordict", "pyarrow", "ray"}),
        # What runs on laptops, in heads and in the operator.
        ("import cormorant_cli.app", LIBRARIES | {"cormorant_worker"}),
        (
            "import numpy, cormorant_client.publishing as p; p.make_body({'a': numpy.zeros(3)})",
            (LIBRARIES - {"numpy"}) | {"httpx2", "httpx", "cormorant_worker", "safetensors"},
        ),
        ("import cormorant_api.server", {"opentelemetry.sdk"}),
        ("import cormorant_contract.schema, cormorant_contract.parsing", LIBRARIES | {"yaml"}),
        ("import cormorant_manifest.reader", {"torch", "tensordict", "ray", "envpool", "pyarrow"}),
        ("import cormorant_operator.__main__", {"torch", "ray", "numpy", "tensordict", "fastapi"}),
        (
            "import cormorant_operator.decide.reconcile",
            {"torch", "ray", "numpy", "tensordict", "yaml", "fastapi", "kopf", "aiohttp", "structlog"},
        ),
    ],
)
def test_imports_stay_light(statement: str, heavy: set[str]) -> None:
    done = run_script(f"{statement}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & heavy


def test_public_class_names_are_unique_or_have_a_reason() -> None:
    lines = [line.partition(": ") for line in REASONS.read_text().splitlines() if line and not line.startswith("#")]
    reasons = {name: reason for name, _, reason in lines}
    assert [name for name, reason in reasons.items() if len(reason) < 20] == []
    found = defaultdict(list)
    for path in sources(*PRODUCT):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            found[name].append(str(path))
    homes = {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}
    assert {name: paths for name, paths in homes.items() if name not in reasons} == {}
    assert sorted(set(reasons) - set(homes)) == [], f"unique by now; delete their lines from {REASONS.name}"


BRITISH = (
    "ormalis|ectoris|ummaris|ecognis|nitialis|erialis|ptimis|inimis|aximis|ynchronis|arallelis|tilis[ai]|rganis[ai]|"
    "olour|ehaviour|eighbour|avour|learnt|grey|[^-]labelled|rioritis|andomis|nalyse|centre\\b|artefact|whilst"
)
"""Parts of words that the field's APIs spell otherwise: normalize, vectorize, color, behavior, labeled, center."""


def test_spelling_is_american() -> None:
    others = (".", ":!LICENSE", f":!{Path(__file__).relative_to(ROOT)}")
    command = ["git", "grep", "--perl-regexp", "-nIi", BRITISH, "--", *others]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")  # 1: nothing was found
