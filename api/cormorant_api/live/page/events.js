// What happened lately, newest first.

import { clock, count, words } from "./format.js";

const MOST = 100;

export class Events {
  constructor(list, note) {
    this.list = list;
    this.note = note;
    this.seen = new Set();
  }

  add(events) {
    for (const event of events) {
      if (this.seen.has(event.id)) continue;
      this.seen.add(event.id);
      this.tell(event.time, sentenceOf(event));
    }
    if (this.seen.size > 20 * MOST) this.seen = new Set([...this.seen].slice(-10 * MOST));
  }

  /** Something that this page itself noticed, or an event in words. */
  tell(when, text) {
    const item = document.createElement("li");
    const time = item.appendChild(document.createElement("time"));
    time.dateTime = new Date(when).toISOString();
    time.textContent = clock(when);
    item.append(` ${text}`);
    this.list.prepend(item);
    this.note.hidden = true;
    while (this.list.children.length > MOST) this.list.lastChild.remove();
  }
}

function sentenceOf(event) {
  const parts = [words(event.kind)];
  if (event.worker) parts.push(event.worker);
  if (event.version > 0) parts.push(`version ${event.version}`);
  if (event.state) parts.push(words(event.state));
  if (event.frames) parts.push(`${count(event.frames)} frames`);
  return parts.join(" · ") + (event.reason ? `: ${event.reason}` : "");
}
