// A line over time, with a band around it where there is one, as SVG. Point at it, or walk along it with the arrow keys.
// What a subclass draws and says instead: `ticks`, `label`, `layers`, `words`, `range`.

import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const GAP_S = 5; // a longer silence is no line
const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };

export class Plot {
  /**
   * @param {HTMLElement} figure gets the SVG, and an output with what is under the cursor.
   * @param {{name: string, format: (value: number) => string}} what
   */
  constructor(figure, { name, format }) {
    this.name = name;
    this.format = format;
    this.points = []; // [seconds since 1970, value or null, low or null, high or null]
    this.at = null; // what the cursor stands at; null: the newest
    this.svg = figure.appendChild(document.createElementNS(SVG, "svg"));
    this.readout = figure.appendChild(document.createElement("output"));
    this.readout.setAttribute("aria-live", "off");
    const attributes = { tabindex: 0, role: "slider", "aria-orientation": "horizontal", "aria-label": `${name} over time` };
    set(this.svg, attributes);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#moveTo(null));
    this.svg.addEventListener("blur", () => this.#moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** Show points of the last seconds. */
  show(points, { seconds, now }) {
    this.now = now;
    this.seconds = seconds;
    this.points = points.filter(([at]) => at >= now - seconds);
    this.#draw();
  }

  #onKey(event) {
    const known = this.points.filter(([, value]) => value !== null);
    if (!known.length) return;
    const index = this.at === null ? known.length - 1 : known.findIndex(([at]) => at >= this.at);
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
    let next;
    if (event.key in steps) next = index + steps[event.key];
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = known.length - 1;
    else return;
    event.preventDefault();
    this.#moveTo(known[Math.min(known.length - 1, Math.max(0, next))][0]);
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const wanted = this.now - this.seconds + ((event.clientX - box.left - MARGIN.left) / this.#width()) * this.seconds;
    const known = this.points.filter(([, value]) => value !== null);
    if (!known.length) return;
    this.#moveTo(known.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))[0]);
  }

  #moveTo(at) {
    this.at = at;
    this.#draw();
  }

  #width() {
    return Math.max(10, this.svg.clientWidth - MARGIN.left - MARGIN.right);
  }

  #draw() {
    if (this.now === undefined || !this.svg.clientWidth) return;
    const width = this.#width();
    const height = this.svg.clientHeight - MARGIN.top - MARGIN.bottom;
    const known = this.points.filter(([, value]) => value !== null);
    const ticks = this.ticks(known);
    const [low, high] = [ticks[0], ticks[ticks.length - 1]];
    const x = (at) => MARGIN.left + (1 - (this.now - at) / this.seconds) * width;
    const y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * height;
    const parts = ticks.flatMap((tick) => [
      make("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + width, y1: y(tick), y2: y(tick) }),
      make("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, this.label(tick)),
    ]);
    const bottom = MARGIN.top + height + 16;
    const shown = (this.at !== null && known.find(([at]) => at >= this.at)) || known[known.length - 1];
    parts.push(
      make("text", { x: MARGIN.left, y: bottom }, clock(this.now - this.seconds)),
      make("text", { x: MARGIN.left + width, y: bottom, "text-anchor": "end" }, clock(this.now)),
      ...this.layers(x, y, shown),
    );
    if (shown && this.at !== null) parts.push(make("line", { class: "cursor", x1: x(shown[0]), x2: x(shown[0]), y1: MARGIN.top, y2: MARGIN.top + height }));
    for (const part of parts) part.setAttribute("aria-hidden", "true");
    this.svg.replaceChildren(...parts);
    this.#tell(shown, known);
  }

  ticks(known) {
    return ticksOf(known.flatMap(([, value, low, high]) => [value, low ?? value, high ?? value]));
  }

  label(tick) {
    return Math.abs(tick) >= 1000 ? tick.toLocaleString("en", { notation: "compact" }) : String(Number(tick.toPrecision(6)));
  }

  layers(x, y, shown) {
    return [
      ...runsOf(this.points, ([, , low, high]) => (low ?? null) !== null && high !== null).map((band) => make("path", { class: "band", d: outlineOf(band, x, y) })),
      make("path", { class: "line", d: pathOf(this.points, x, y) }),
      ...(shown ? [make("circle", { class: "dot", cx: x(shown[0]), cy: y(shown[1]), r: 3.5 })] : []),
    ];
  }

  words([at, value]) {
    return `${clock(at)}: ${this.format(value)}`;
  }

  range(values) {
    return `, lowest ${this.format(Math.min(...values))}, highest ${this.format(Math.max(...values))}`;
  }

  #tell(shown, known) {
    const text = shown ? this.words(shown) : "nothing yet";
    if (this.readout.textContent !== text) this.readout.textContent = text;
    const range = shown ? this.range(known.map(([, value]) => value)) : "";
    set(this.svg, {
      "aria-valuemin": Math.round(this.now - this.seconds),
      "aria-valuemax": Math.round(this.now),
      "aria-valuenow": Math.round(shown ? shown[0] : this.now),
      "aria-valuetext": `${text}${range}`,
    });
  }
}

function pathOf(points, x, y) {
  let path = "";
  let before = null;
  let step = 0;
  for (const [at, value] of points) {
    if (value === null) {
      before = null;
      continue;
    }
    const joins = before !== null && isJoined(before, at, step);
    path += `${joins ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!joins) path += "h0.1"; // a lone point is seen, too
    if (joins) step = at - before;
    before = at;
  }
  return path;
}

/** Whether a line leads from one sample to the next: older samples stand for longer spans. */
const isJoined = (before, at, step) => at - before <= Math.max(GAP_S, 3 * step);

/** Points in runs without gaps, and without those that are no part of one. */
export function runsOf(points, isPart = () => true) {
  const runs = [];
  let run = [];
  for (const point of points) {
    const step = run.length > 1 ? run[run.length - 1][0] - run[run.length - 2][0] : 0;
    if (run.length && (!isPart(point) || !isJoined(run[run.length - 1][0], point[0], step))) {
      runs.push(run);
      run = [];
    }
    if (isPart(point)) run.push(point);
  }
  return run.length ? [...runs, run] : runs;
}

/** The area between the low and the high of a run. */
export function outlineOf(band, x, y) {
  const above = band.map(([at, , , high]) => `${x(at).toFixed(1)} ${y(high).toFixed(1)}`);
  const below = band.map(([at, , low]) => `${x(at).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
  return `M${[...above, ...below].join("L")}Z`;
}

/** Three to six round numbers around the values. */
function ticksOf(values) {
  const lowest = Math.min(...values, 0);
  const highest = Math.max(...values, 0) || (lowest ? 0 : 1);
  const span = highest - lowest;
  const rough = 10 ** Math.floor(Math.log10(span / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * rough).find((size) => span / size <= 5);
  const ticks = [];
  for (let i = Math.floor(lowest / step); i <= Math.ceil(highest / step) || ticks.length < 2; i += 1) ticks.push(i * step);
  return ticks;
}

export function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  if (text !== undefined) element.textContent = text;
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}
