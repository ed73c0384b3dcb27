"""`.github/release` is true to what it releases."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".github" / "release"


def test_package_chart_and_changelog_have_one_version() -> None:
    done = subprocess.run([SCRIPT, "versions"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_extra_is_installed_alone_before_a_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = SCRIPT.read_text()
    assert [extra for extra in extras if extra != "dev" and f"    {extra}) echo " not in text] == []
