"""Run examples/self_play.py and draw docs/images/self-play.svg: `python -m benchmarks.self_play [--draw]`.

Networks and the curve are in benchmarks/results/self-play; `--draw` only draws that curve.
"""

import json
import subprocess
import sys

from benchmarks.chart import IMAGE
from benchmarks.contenders import ROOT
from benchmarks.cost import Point, draw

_FOLDER = ROOT / "benchmarks" / "results" / "self-play"
_WHOM = {"over random moves": "random moves", "over the network of 40 updates ago": "40 updates ago"}


def main() -> None:
    if sys.argv[1:] != ["--draw"]:
        subprocess.run([sys.executable, ROOT / "examples" / "self_play.py", "--output", _FOLDER], check=True)
    curve = json.loads((_FOLDER / "curve.json").read_text())
    points: dict[str, Point] = {
        str(point["frames"]): {name: point[key] for key, name in _WHOM.items() if key in point} for point in curve
    }
    (IMAGE.parent / "self-play.svg").write_text(draw(points, ("frames", "share of wins over", ()), is_log=False))


if __name__ == "__main__":
    main()
