"""`python -m charts.monitoring [--check]`: writes rules, dashboards and the page of metrics, or says which differ."""

import argparse
import sys
from pathlib import Path

from charts.monitoring.dashboards import dashboards
from charts.monitoring.metrics_page import page_text
from charts.monitoring.rule_file import rules_text

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "charts" / "cormorant" / "files"


def main() -> int:
    """Write or compare. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m charts.monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a file is out of date")
    given = parser.parse_args()
    texts = {
        ROOT / "docs" / "reference" / "metrics.md": page_text(),
        FILES / "rules" / "cormorant.yaml": rules_text(),
        **{FILES / "dashboards" / f"{name}.json": text for name, text in dashboards().items()},
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if given.check:
            sys.stderr.write(f"{path} is not what the contract says; run make docs\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path])
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
