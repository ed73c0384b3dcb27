"""The last release, from this repository's history: to upgrade from."""

import subprocess
from pathlib import Path

from cormorant_testing.needs import lacks

ROOT = Path(__file__).resolve().parents[3]
REVISION = "58884438542a67b870b0ed599fc5d6dfc4041522"
"""Of v0.2.0."""


def unpack(folder: Path) -> Path:
    """Its files. Skips the test in a clone without history."""
    archive = folder / "release.tar"
    done = subprocess.run(["git", "archive", "--output", archive, REVISION], cwd=ROOT, capture_output=True, timeout=60)
    if done.returncode:
        lacks("history", f"this clone does not have {REVISION}, the last release: git fetch --unshallow")
    tree = folder / "release"
    tree.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", tree], check=True, timeout=60)
    return tree
