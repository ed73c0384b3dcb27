"""The peers' own tests, with their collectors exchanged for ours: nothing fails but what the guides say.

`PEERS_SOURCES` names checkouts or source distributions of the peers (folders or .tar.gz, separated as in PATH); without
one each suite is skipped. `differences/` lists the tests that fail, each with its row of the guide.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cormorant_testing.peers import find

pytest.importorskip("tianshou", reason="Tianshou is not installed; `make test-peers` runs these tests")
pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

HERE = Path(__file__).parent
LIMIT_S = 2300


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One file of a peer's tests."""

    peer: str
    file: str
    is_sampled: bool = False
    """Run one variant of each test: all of them take hours."""

    @property
    def differences(self) -> dict[str, str]:
        """By pattern of a test's name: why it fails here."""
        lines = (HERE / "differences" / f"{self.peer}-{Path(self.file).stem}.txt").read_text().splitlines()
        pairs = [line.split("  ", 1) for line in lines if line and not line.startswith("#")]
        return {name: reason.strip() for name, reason in pairs}


SUITES = [
    Suite(peer="tianshou", file="test/base/test_collector.py"),
    Suite(peer="torchrl", file="test/test_postprocs.py"),
    Suite(peer="torchrl", file="test/libs/test_envpool.py"),
    Suite(peer="torchrl", file="test/test_collectors.py", is_sampled=True),
]


def failures(suite: Suite, root: Path, folder: Path) -> tuple[set[str], int]:
    """Names of the tests that failed, `TestClass.test_name[case]`, and how many there were."""
    report = folder / "report.xml"
    # The tests alone: a checkout's own package would be imported in place of the one that is installed.
    tests = Path(suite.file).parts[0]
    shutil.copytree(root / tests, folder / "alone" / tests)
    root = folder / "alone"
    paths = [str(root), str((root / suite.file).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [
        sys.executable, "-m", "pytest", suite.file, "-p", "cormorant_testing.swapped", "-p", "no:cacheprovider", "-q",
        "-W", "ignore", "--timeout", "120", "--junitxml", str(report),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=root,
        env={
            **os.environ,
            "SWAPPED_PEER": suite.peer,
            "SWAPPED_VARIANTS": "one" if suite.is_sampled else "all",
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert report.is_file(), done.stdout + done.stderr
    failed, count = set(), 0
    for case in ElementTree.parse(report).iter("testcase"):  # our own run's report
        count += 1
        parts = str(case.get("classname")).split(".")
        group = parts[-1] + "." if parts[-1].startswith("Test") else ""
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(f"{group}{case.get('name')}")
    return failed, count


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"{suite.peer}-{Path(suite.file).stem}")
def test_a_peers_own_tests_fail_only_where_the_guide_says(suite: Suite, tmp_path: Path) -> None:
    failed, count = failures(suite, find(suite.file, tmp_path), tmp_path)
    assert count > 0
    known = suite.differences
    assert sorted(name for name in failed if not any(fnmatch(name, pattern) for pattern in known)) == []
    assert [pattern for pattern in known if not any(fnmatch(name, pattern) for name in failed)] == []
