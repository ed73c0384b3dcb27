// The last lines of the head's log, newest first; warnings and errors stand out, and can be shown alone.

import { clock } from "./format.js";

const MOST = 200;
const LOUD = new Set(["warning", "error", "critical"]);

export class Log {
  constructor(list, onlyLoud, none) {
    this.list = list;
    this.onlyLoud = onlyLoud;
    this.none = none;
    this.next = 0;
    onlyLoud.addEventListener("change", () => this.#filter());
  }

  /** Another head counts from 0 again. */
  restart() {
    this.next = 0;
  }

  add(lines) {
    for (const line of lines) {
      if (line.number < this.next) continue;
      this.next = line.number + 1;
      const item = document.createElement("li");
      item.dataset.level = line.level;
      const time = item.appendChild(document.createElement("time"));
      time.dateTime = line.time;
      time.textContent = clock(line.time);
      item.append(` ${LOUD.has(line.level) ? `${line.level}: ` : ""}${line.text}`);
      this.list.prepend(item);
      while (this.list.children.length > MOST) this.list.lastChild.remove();
    }
    if (lines.length) this.#filter();
  }

  #filter() {
    let shown = 0;
    for (const item of this.list.children) {
      item.hidden = this.onlyLoud.checked && !LOUD.has(item.dataset.level);
      shown += !item.hidden;
    }
    this.none.hidden = shown > 0;
  }
}
