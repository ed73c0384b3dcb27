"""Draws docs/images/terminal.svg, the output of the commands in the README: `python docs/pictures.py`."""

import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = ("cormorant run job.yaml", "cormorant dataset verify data/cheetah")
COLUMNS = 100


def manifest() -> str:
    (found,) = re.findall(
        r"^```yaml\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(found)


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(manifest())
        for command in COMMANDS:
            program, *rest = shlex.split(command)
            done = subprocess.run(
                [Path(sys.executable).parent / program, *rest],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
                timeout=300,
            )
            console.print(
                Text.assemble(("$ ", "bold green"), (command, "bold"))
            )
            console.print(Text(done.stdout))
    svg = console.export_svg(title="cormorant run job.yaml")
    PICTURE.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    )  # without fonts from the network


if __name__ == "__main__":
    main()
