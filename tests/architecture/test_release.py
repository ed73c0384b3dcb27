"""`.github/release` is true to what it releases, and images install exactly what this checkout is tested with."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"(?m)^([a-z0-9-]+)==([^\s;]+)")
SCRIPT = ROOT / ".github" / "release"


def test_package_chart_and_changelog_have_one_version() -> None:
    done = subprocess.run([SCRIPT, "versions"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_extra_is_installed_alone_before_a_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = SCRIPT.read_text()
    assert [extra for extra in extras if extra != "dev" and f"    {extra}) echo " not in text] == []


def test_images_have_the_tested_versions_by_digest() -> None:
    # A package may have one version for each platform.
    tested = set(PIN.findall((ROOT / "constraints.txt").read_text()))
    pinned = (ROOT / "images" / "constraints.txt").read_text()
    images = set(PIN.findall(pinned))
    assert {"torch", "ray", "envpool", "kopf", "uv"} <= {name for name, _ in images}
    bare = [line for line in pinned.splitlines() if not re.search(r" --hash=sha256:[0-9a-f]{64}", line)]
    assert (images - tested, bare) == (set(), []), "run: .venv/bin/python images/lock.py"
