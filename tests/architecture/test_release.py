"""`.github/release` is true to what it releases."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".github" / "release"


def test_package_chart_and_changelog_have_one_version() -> None:
    done = subprocess.run([SCRIPT, "versions"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_names_the_kubernetes_version_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "cormorant" / "Chart.yaml").read_text())
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    pages = [ROOT / "README.md", *ROOT.glob("charts/**/*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("api/**/*.md")]
    named = {
        (page.name, version)
        for page in pages
        for version in re.findall(r"(?:Kubernetes|kubectl) ([\d.]+) or newer", page.read_text())
    }
    assert ("README.md", oldest) in named
    assert [(page, version) for page, version in named if version != oldest] == []


def test_every_extra_is_installed_alone_before_a_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = SCRIPT.read_text()
    assert [extra for extra in extras if extra != "dev" and f"    {extra}) echo " not in text] == []
