"""The last release, from this repository's history: to upgrade from."""

import subprocess
from pathlib import Path

from cormorant_testing.needs import lacks

ROOT = Path(__file__).resolve().parents[3]
SUBJECT = "release notes of v0.2.0"
"""Subject of the released commit. Its digest would not survive a rewrite of the history."""


def unpack(folder: Path) -> Path:
    """Its files. Skips the test in a clone without history."""
    archive = folder / "release.tar"
    search = ["git", "log", "-1", "--format=%H", "--fixed-strings", f"--grep={SUBJECT}"]
    revision = subprocess.run(search, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()
    if not revision:
        lacks("history", f"this clone does not have the last release, {SUBJECT!r}: git fetch --unshallow")
    subprocess.run(["git", "archive", "--output", archive, revision], cwd=ROOT, check=True, timeout=60)
    tree = folder / "release"
    tree.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", tree], check=True, timeout=60)
    return tree
