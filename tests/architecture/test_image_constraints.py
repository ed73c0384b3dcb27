"""Images install exactly what this checkout is tested with, and verify it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"(?m)^([a-z0-9-]+)==([^\s;]+)")


def test_images_have_the_tested_versions() -> None:
    # A package may have one version for each platform.
    tested = set(PIN.findall((ROOT / "constraints.txt").read_text()))
    images = set(PIN.findall((ROOT / "images" / "constraints.txt").read_text()))
    assert {"torch", "ray", "envpool", "kopf", "uv"} <= {name for name, _ in images}
    assert images - tested == set(), "run: .venv/bin/python images/lock.py"


def test_every_dependency_of_images_has_a_digest() -> None:
    lines = (ROOT / "images" / "constraints.txt").read_text().splitlines()
    bare = [line for line in lines if not re.search(r" --hash=sha256:[0-9a-f]{64}", line)]
    assert bare == [], "run: .venv/bin/python images/lock.py"


def test_what_the_cpu_image_leaves_out_is_a_dependency() -> None:
    known = dict(PIN.findall((ROOT / "images" / "constraints.txt").read_text()))
    excluded = [line for line in (ROOT / "images" / "excludes-cpu.txt").read_text().split("\n") if line[:1].isalpha()]
    assert [name for name in excluded if name not in known] == []
