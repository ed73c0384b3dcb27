"""Draw the curve that rest_ppo_halfcheetah.py wrote: mean returns over frames, starts of the learner marked.

python examples/plot_returns.py curve.jsonl returns.svg
"""

import json
import sys
from pathlib import Path

LEFT, TOP, WIDTH, HEIGHT = 56, 28, 560, 220
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.curve { fill: none; stroke: #00796b; stroke-width: 2 } .axis { stroke: #9aa5b1 }
.kill { stroke: #c62828; stroke-dasharray: 4 3 } .red { fill: #c62828 }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de } .curve { stroke: #26a69a } .kill { stroke: #ef5350 } .red { fill: #ef5350 }
}
"""


def draw(lines: list[dict]) -> str:
    """SVG of the lines of one curve; starts after the first are kills."""
    points = [(line["frames"], line["return"]) for line in lines if line.get("return") is not None]
    if len(points) < 2:
        raise SystemExit("the curve has fewer than two returns; train until more episodes have ended")
    kills = [line for line in lines if line["event"] == "start"][1:]
    most = max(frames for frames, _ in points)
    low, high = min(0.0, *(value for _, value in points)), max(0.0, *(value for _, value in points))

    def x(frames: float) -> float:
        return LEFT + WIDTH * frames / most

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    rows = [f'<polyline class="curve" points="{" ".join(f"{x(f):.1f},{y(v):.1f}" for f, v in points)}"/>']
    for value in sorted({low, 0.0, high}):
        rows.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="axis"/>')
        rows.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>')
    for kill in kills:
        at, label = x(kill["frames"]), f"killed, resumed at version {kill['version']}"
        rows.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" class="kill"/>')
        rows.append(f'<text x="{at:.1f}" y="{TOP - 8}" text-anchor="middle" class="red">{label}</text>')
    for frames in (0, most / 2, most):
        at, below = x(frames), TOP + HEIGHT + 18
        rows.append(f'<text x="{at:.1f}" y="{below}" text-anchor="middle">{frames:,.0f}</text>')
    width, height = LEFT + WIDTH + 40, TOP + HEIGHT + 28
    name = "Mean return of the last 100 episodes over frames"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    return "\n".join([f'{opening} role="img" aria-label="{name}">', f"<style>{STYLE}</style>", *rows, "</svg>\n"])


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw([json.loads(line) for line in Path(source).read_text().splitlines()]))
