// Where the workers' time goes, as stacked areas over time. The newest values stand below in words.

import { clock } from "./format.js";
import { isJoined, make, set } from "./plot.js";

const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };

export class Shares {
  /**
   * @param {HTMLElement} figure gets the SVG, the legend and an output.
   * @param {{key: string, name: string}[]} parts bottom first.
   */
  constructor(figure, parts) {
    this.parts = parts;
    this.points = []; // [seconds since 1970, {key: share}]
    this.svg = figure.appendChild(make("svg", { role: "img", "aria-label": "Where the workers' time goes. Nothing yet." }));
    const legend = figure.appendChild(document.createElement("p"));
    legend.className = "legend";
    parts.forEach(({ name }, i) => {
      const item = legend.appendChild(document.createElement("span"));
      item.className = `share share-${i}`;
      item.textContent = name;
    });
    this.readout = figure.appendChild(document.createElement("output"));
    this.readout.setAttribute("aria-live", "off");
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** Show points of the last seconds; `isTotal`: the words are about all of them. */
  show(points, { seconds, now, isTotal }) {
    this.isTotal = isTotal;
    this.seconds = seconds;
    this.now = now;
    this.points = points.filter(([at, shares]) => at >= now - seconds && Object.keys(shares).length);
    this.#draw();
  }

  #draw() {
    if (this.now === undefined || !this.svg.clientWidth) return;
    const width = Math.max(10, this.svg.clientWidth - MARGIN.left - MARGIN.right);
    const height = this.svg.clientHeight - MARGIN.top - MARGIN.bottom;
    const x = (at) => (MARGIN.left + (1 - (this.now - at) / this.seconds) * width).toFixed(1);
    const y = (share) => (MARGIN.top + (1 - share) * height).toFixed(1);
    const drawn = [];
    for (const run of runsOf(this.points)) {
      let floors = run.map(() => 0);
      this.parts.forEach(({ key }, i) => {
        const tops = run.map(([, shares], at) => Math.min(1, floors[at] + (shares[key] ?? 0)));
        const above = run.map(([at], n) => `${x(at)} ${y(tops[n])}`);
        const below = run.map(([at], n) => `${x(at)} ${y(floors[n])}`).reverse();
        drawn.push(make("path", { class: `share-${i}`, d: `M${[...above, ...below].join("L")}Z` }));
        floors = tops;
      });
    }
    const bottom = MARGIN.top + height + 16;
    for (const share of [0, 0.5, 1]) drawn.push(make("text", { x: MARGIN.left - 6, y: Number(y(share)) + 4, "text-anchor": "end" }, `${100 * share} %`));
    drawn.push(
      make("text", { x: MARGIN.left, y: bottom }, clock(this.now - this.seconds)),
      make("text", { x: MARGIN.left + width, y: bottom, "text-anchor": "end" }, clock(this.now)),
    );
    for (const part of drawn) part.setAttribute("aria-hidden", "true");
    this.svg.replaceChildren(...drawn);
    const text = this.#words();
    set(this.svg, { "aria-label": `Where the workers' time goes. ${text}` });
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  #words() {
    const newest = this.points[this.points.length - 1];
    if (!newest) return "nothing yet";
    const told = this.isTotal ? this.points : [newest];
    const shares = Object.fromEntries(this.parts.map(({ key }) => [key, told.reduce((sum, [, found]) => sum + (found[key] ?? 0), 0) / told.length]));
    const known = this.parts.filter(({ key }) => shares[key] >= 0.005);
    return `${this.isTotal ? "In total" : clock(newest[0])}: ${known.map(({ key, name }) => `${name} ${Math.round(100 * shares[key])} %`).join(", ")}`;
  }
}

/** Points in runs without gaps. */
function runsOf(points) {
  const runs = [];
  let run = [];
  for (const point of points) {
    const step = run.length > 1 ? run[run.length - 1][0] - run[run.length - 2][0] : 0;
    if (run.length && !isJoined(run[run.length - 1][0], point[0], step)) {
      runs.push(run);
      run = [];
    }
    run.push(point);
  }
  return run.length ? [...runs, run] : runs;
}
