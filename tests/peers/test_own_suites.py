"""The peers' own tests, with their collectors exchanged for ours: nothing fails but what the guides say.

`PEERS_SOURCES` names checkouts or source distributions of the peers (folders or .tar.gz, separated as in PATH); without
one each suite is skipped. `differences/` lists the tests that fail, each with its row of the guide.
"""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

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


def find(suite: Suite, folder: Path) -> Path | None:
    """The checkout that has a suite, or what a source distribution holds of it."""
    for given in filter(None, os.environ.get("PEERS_SOURCES", "").split(os.pathsep)):
        path = Path(given)
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            path = folder
        for root in (path, *(child for child in path.iterdir() if child.is_dir())):
            if (root / suite.file).is_file():
                return root
    return None


def failures(suite: Suite, root: Path, folder: Path) -> tuple[set[str], int]:
    """Names of the tests that failed, `TestClass.test_name[case]`, and how many there were."""
    report = folder / "report.xml"
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
    root = find(suite, tmp_path)
    if root is None:
        pytest.skip(f"PEERS_SOURCES names no checkout of {suite.peer} with {suite.file}: its own tests were left out")
    failed, count = failures(suite, root, tmp_path)
    assert count > 0
    known = suite.differences
    assert sorted(name for name in failed if not any(fnmatch(name, pattern) for pattern in known)) == []
    assert [pattern for pattern in known if not any(fnmatch(name, pattern) for name in failed)] == []


EXAMPLE = Suite(peer="tianshou", file="examples/discrete/discrete_dqn.py")
SHORTER = (
    ("64\n    num_training_envs, num_test_envs = 10, 100", "64\n    num_training_envs, num_test_envs = 10, 4"),
    ("lr, epoch, batch_size = 1e-3, 10,", "lr, epoch, batch_size = 1e-3, 1,"),
    (
        "epoch_num_steps, collection_step_num_env_steps = 10000, 10",
        "epoch_num_steps, collection_step_num_env_steps = 200, 10",
    ),
    (', render_mode="human")', ")"),
    ("n_episode=100, render=1 / 35)", "n_episode=2)"),
)
"""Sizes, and the display."""
SWAPPED = """import cormorant_testing.swapped, tianshou.data
assert tianshou.data.Collector.__module__.startswith("cormorant_worker")
"""


def test_tianshous_dqn_example_runs_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the example writes TensorBoard's logs; pip install tensorboard")
    root = find(EXAMPLE, tmp_path)
    if root is None:
        pytest.skip(f"PEERS_SOURCES names no checkout of tianshou with {EXAMPLE.file}: the example was left out")
    script = (root / EXAMPLE.file).read_text()
    for old, new in SHORTER:
        assert old in script, f"the example has changed: {old}"
        script = script.replace(old, new)
    (tmp_path / "example.py").write_text(f"{SWAPPED}{script}")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "SWAPPED_PEER": "tianshou", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Finished training in" in done.stdout
