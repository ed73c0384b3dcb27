// Where the workers' time goes, as stacked areas over time. What is under the cursor, or the newest, stands below in words.

import { clock } from "./format.js";
import { Plot, make, outlineOf, runsOf } from "./plot.js";

export class Shares extends Plot {
  /**
   * @param {HTMLElement} figure gets the SVG, the legend and an output.
   * @param {{key: string, name: string}[]} parts bottom first.
   */
  constructor(figure, parts) {
    super(figure, { name: "Where the workers' time goes," });
    this.parts = parts;
    const legend = document.createElement("p");
    legend.className = "legend";
    parts.forEach(({ name }, i) => {
      const item = legend.appendChild(document.createElement("span"));
      item.className = `share share-${i}`;
      item.textContent = name;
    });
    this.readout.before(legend);
  }

  /** Show points, [seconds since 1970, {key: share}], of the last seconds; `isTotal`: the words are about all of them. */
  show(points, { isTotal, ...span }) {
    this.isTotal = isTotal;
    super.show(points.filter(([, shares]) => Object.keys(shares).length), span);
  }

  ticks() {
    return [0, 0.5, 1];
  }

  label(tick) {
    return `${100 * tick} %`;
  }

  layers(x, y) {
    return runsOf(this.points).flatMap((run) => {
      const tops = run.map(() => 0);
      return this.parts.map(({ key }, i) => {
        const band = run.map(([at, shares], n) => [at, null, tops[n], (tops[n] = Math.min(1, tops[n] + (shares[key] ?? 0)))]);
        return make("path", { class: `share-${i}`, d: outlineOf(band, x, y) });
      });
    });
  }

  words(shown) {
    const isTotal = this.isTotal && this.at === null;
    const told = isTotal ? this.points : [shown];
    const means = this.parts.map(({ key, name }) => [name, told.reduce((sum, [, shares]) => sum + (shares[key] ?? 0), 0) / told.length]);
    const known = means.filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${Math.round(100 * share)} %`);
    return `${isTotal ? "In total" : clock(shown[0])}: ${known.join(", ")}`;
  }

  range() {
    return "";
  }
}
