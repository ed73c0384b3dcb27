"""`python -m cormorant_contract.chart FOLDER [--check]`: writes the chart's generated files, or says which differ."""

import argparse
import sys
from pathlib import Path

from cormorant_contract.chart.files import readme_text, schema_text, values_text


def main() -> int:
    """Write or compare. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cormorant_contract.chart", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the chart")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    given = parser.parse_args()
    texts = {
        given.folder / "values.yaml": values_text(),
        given.folder / "values.schema.json": schema_text(),
        given.folder / "README.md": readme_text((given.folder / "README.md").read_text()),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if given.check:
            sys.stderr.write(f"{path} is out of date; run make docs\n")
        else:
            path.write_text(texts[path])
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
