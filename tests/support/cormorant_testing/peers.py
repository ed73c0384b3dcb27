"""Where the peers' own tests and examples are: `PEERS_SOURCES`. Used by tests/peers."""

import os
import tarfile
from pathlib import Path

import pytest


def find(file: str, folder: Path) -> Path:
    """The checkout that has a file, or what a source distribution holds of it. Skips the test where there is none."""
    sources = list(filter(None, os.environ.get("PEERS_SOURCES", "").split(os.pathsep)))
    if not sources:  # one reason, so that pytest says in one line what was left out
        pytest.skip("PEERS_SOURCES names no checkouts of the peers: their own tests and examples were left out")
    for given in sources:
        path = Path(given)
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            path = folder
        for root in (path, *(child for child in path.iterdir() if child.is_dir())):
            if (root / file).is_file():
                return root
    pytest.skip(f"no checkout of PEERS_SOURCES has {file}: it was left out")
