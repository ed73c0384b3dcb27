"""Write images/constraints.txt: the pins of constraints.txt that images use, with the digests of their wheels.

`make constraints` runs it. Says for each architecture of `PLATFORMS` which packages have no wheel there.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "images" / "constraints.txt"
EXTRAS = ("worker", "s3", "gpu", "ray", "api", "otel", "cli", "operator")
PYTHON = "3.11"
PLATFORMS = {"amd64": "x86_64", "arm64": "aarch64"}


def pins() -> list[str]:
    """`name==version` of everything in the images, and of what they are built with."""
    uv = Path(sys.executable).with_name("uv")
    extras = [argument for extra in EXTRAS for argument in ("--extra", extra)]
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", *extras,
               "--constraint", "constraints.txt", "--python-version", PYTHON, "pyproject.toml"]  # fmt: skip
    shown = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    known = dict(re.findall(r"(?m)^(\S+)==(\S+)", (ROOT / "constraints.txt").read_text()))
    tools = {f"{name}=={known[name]}" for name in ("uv", "hatchling") if name in known}
    return sorted({line for line in shown.split() if "==" in line} | tools)


def digests(wanted: list[str], machine: str) -> dict[str, str]:
    """sha256 of the wheel that pip takes on this machine, by name; packages without one are left out."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 40)]
    tags = [argument for tag in (*platforms, f"manylinux2014_{machine}") for argument in ("--platform", tag)]
    left = list(wanted)
    while True:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet",
                   "--only-binary", ":all:", "--python-version", PYTHON, "--target", "unused", *tags,
                   "--report", "-", *left]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            found = json.loads(done.stdout)["install"]
            return {
                item["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): sha256
                for item in found
                if (sha256 := item["download_info"]["archive_info"]["hashes"]["sha256"])
            }
        missing = re.search(r"No matching distribution found for (\S+)", done.stderr)
        if missing is None or missing[1] not in left:
            raise SystemExit(f"cannot look up wheels for {machine}: {done.stderr[-2000:]}")
        left.remove(missing[1])


def main() -> None:
    wanted = pins()
    by_platform = {name: digests(wanted, machine) for name, machine in PLATFORMS.items()}
    lines = []
    for pin in wanted:
        name = pin.partition("==")[0]
        hashes = sorted({found[name] for found in by_platform.values() if name in found})
        lines.append(" ".join([pin, *(f"--hash=sha256:{digest}" for digest in hashes)]))
    TARGET.write_text("\n".join(lines) + "\n")
    for platform, found in by_platform.items():
        without = [pin for pin in wanted if pin.partition("==")[0] not in found]
        sys.stdout.write(f"{platform}: no wheel of {', '.join(without) or 'none'}\n")


if __name__ == "__main__":
    main()
