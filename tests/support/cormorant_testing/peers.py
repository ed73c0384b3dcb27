"""Where the peers' own tests and examples are: `PEERS_SOURCES`. Used by tests/peers."""

import os
import tarfile
from pathlib import Path


def find(file: str, folder: Path) -> Path | None:
    """The checkout that has a file, or what a source distribution holds of it."""
    for given in filter(None, os.environ.get("PEERS_SOURCES", "").split(os.pathsep)):
        path = Path(given)
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            path = folder
        for root in (path, *(child for child in path.iterdir() if child.is_dir())):
            if (root / file).is_file():
                return root
    return None
