"""The peers' own tests, with their collectors exchanged for ours: nothing fails but what the guides say.

`PEERS_SOURCES` names checkouts or source distributions of the peers (folders or .tar.gz, separated as in PATH); without
one each suite is skipped. `PEERS_VARIANTS=all` runs every variant of every test, which takes an hour; else those of
TorchRL's collectors are sampled. `differences/` lists the tests that fail, each with its row of the guide.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cormorant_testing.peers import find

pytest.importorskip("tianshou", reason="Tianshou is not installed; `make test-peers` runs these tests")
pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

RUNS_ALL = os.environ.get("PEERS_VARIANTS") == "all"
LIMIT_S = 9000 if RUNS_ALL else 2300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 100)]

HERE = Path(__file__).parent
PRIVATE = re.compile(
    r"^(\s+)(assert .*\b(?:c|c?collector)\._(?:frames|iter|use_buffers|weight_sync_schemes|wrapped_policy)\b.*"
    r"|assert isinstance\(\n\s+collector\._weight_sync_schemes[^)]*\)|collector_(?:frames|iter) = collector\._\w+"
    r"|(?:saved_traj_id = |assert collector\.state_dict\(\)).*\btraj_pool\b.*)$",
    re.MULTILINE,
)
"""Lines that look into private attributes of TorchRL's collectors, or at the pool of ids in their states: left
out, so that the rest of each test judges."""


SUITES = [
    ("tianshou", "test/base/test_collector.py", True),
    ("torchrl", "test/test_postprocs.py", True),
    ("torchrl", "test/libs/test_envpool.py", True),
    ("torchrl", "test/test_collectors.py", RUNS_ALL),  # one or two variants of each test, unless all are asked for
]


def outcomes(peer: str, tests_file: str, root: Path, folder: Path, *, runs_all: bool) -> dict[str, bool]:
    """By name of a test, `TestClass.test_name[case]`: whether it passed. Those that were skipped are not there."""
    report = folder / "report.xml"
    # The tests alone: a checkout's own package would be imported in place of the one that is installed.
    tests = Path(tests_file).parts[0]
    shutil.copytree(root / tests, folder / "alone" / tests)
    root = folder / "alone"
    file = root / tests_file
    file.write_text(PRIVATE.sub(r"\1pass", file.read_text()))
    paths = [str(root), str(file.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [
        sys.executable, "-m", "pytest", tests_file, "-p", "cormorant_testing.swapped", "-p", "no:cacheprovider", "-q",
        "-W", "ignore", "--timeout", "300", "--junitxml", str(report),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=root,
        env={
            **os.environ,
            "SWAPPED_PEER": peer,
            "OMP_NUM_THREADS": "1",  # small networks: more threads wait for each other beside other work
            "SWAPPED_VARIANTS": "all" if runs_all else "one",
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert report.is_file(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # our own run's report
        parts = str(case.get("classname")).split(".")
        group = parts[-1] + "." if parts[-1].startswith("Test") else ""
        if case.find("skipped") is None:
            found[f"{group}{case.get('name')}"] = case.find("failure") is None and case.find("error") is None
    return found


@pytest.mark.parametrize(("peer", "file", "runs_all"), SUITES)
def test_a_peers_own_tests_fail_only_where_the_guide_says(peer: str, file: str, runs_all: bool, tmp_path: Path) -> None:
    passed = outcomes(peer, file, find(file, tmp_path), tmp_path, runs_all=runs_all)
    assert passed
    # By a test's name, in which * stands for anything, why it fails here.
    lines = (HERE / "differences" / f"{peer}-{Path(file).stem}.txt").read_text().splitlines()
    patterns = [line.split("  ", 1)[0] for line in lines if line and not line.startswith("#")]
    covered = {
        pattern: [name for name in passed if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name)]
        for pattern in patterns
    }
    listed = {name for names in covered.values() for name in names}
    assert sorted(name for name, has_passed in passed.items() if not has_passed and name not in listed) == []
    # Every pattern covers failing tests alone.
    assert sorted(name for name in listed if passed[name]) == []
    assert [pattern for pattern, names in covered.items() if runs_all and not names] == []
