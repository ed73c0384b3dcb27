// The history of weights: a row a publish, and on demand what each worker answered.

import { call } from "./api.js";
import { bytes, clock, millis, words } from "./format.js";
import { setText } from "./rows.js";

const TROUBLE = new Set(["failed", "partially_applied"]);

export class Weights {
  constructor(body, note) {
    this.body = body;
    this.note = note;
    this.rows = new Map(); // by update id: {row, button, details, update}
  }

  show(updates) {
    this.note.hidden = updates.length > 0;
    const known = new Set(updates.map((update) => update.update_id));
    for (const [id, { row, details }] of this.rows) {
      if (known.has(id)) continue;
      row.remove();
      details.remove();
      this.rows.delete(id);
    }
    let place = this.body.firstChild;
    for (const update of updates) {
      const entry = this.rows.get(update.update_id) ?? this.#make(update);
      const isChanged = JSON.stringify(entry.update) !== JSON.stringify(update);
      this.#fill(entry, update);
      if (place !== entry.row) this.body.insertBefore(entry.row, place);
      if (entry.row.nextSibling !== entry.details) entry.row.after(entry.details);
      place = entry.details.nextSibling;
      if (isChanged && !entry.details.hidden) this.#fetch(entry);
    }
  }

  #make(update) {
    const row = document.createElement("tr");
    const header = row.appendChild(document.createElement("th"));
    header.scope = "row";
    const button = header.appendChild(document.createElement("button"));
    button.type = "button";
    button.className = "open";
    button.setAttribute("aria-expanded", "false");
    for (let i = 0; i < 5; i += 1) row.append(document.createElement("td"));
    row.cells[3].className = row.cells[4].className = "number";
    const details = document.createElement("tr");
    details.id = `receipts-${update.update_id}`;
    details.hidden = true;
    const cell = details.appendChild(document.createElement("td"));
    cell.colSpan = 6;
    cell.className = "receipts";
    button.setAttribute("aria-controls", details.id);
    const entry = { row, button, details, cell, update: null };
    button.addEventListener("click", () => {
      details.hidden = !details.hidden;
      button.setAttribute("aria-expanded", String(!details.hidden));
      if (!details.hidden) this.#fetch(entry);
    });
    this.rows.set(update.update_id, entry);
    return entry;
  }

  #fill(entry, update) {
    entry.update = update;
    setText(entry.button, `${update.version}`);
    entry.button.setAttribute("aria-label", `Version ${update.version}, receipts`);
    const cells = entry.row.cells;
    setText(cells[1], words(update.state) + (update.superseded_by ? ` by ${update.superseded_by}` : ""));
    cells[1].classList.toggle("warn", TROUBLE.has(update.state));
    setText(cells[2], `${update.workers.acked} of ${update.workers.total}${update.workers.failed ? `, ${update.workers.failed} refused` : ""}`);
    setText(cells[3], millis(update.slowest_ms));
    setText(cells[4], bytes(update.bytes));
    setText(cells[5], clock(update.staged_at));
  }

  async #fetch(entry) {
    let lines;
    try {
      const update = await call(`v1/updates/${entry.update.update_id}`);
      lines = update.receipts.map((receipt) => `${receipt.worker}: ${receipt.state}, ${millis(receipt.latency_ms)}${receipt.error ? `: ${receipt.error}` : ""}`);
      if (update.error) lines.unshift(update.error);
      if (!lines.length) lines.push("No worker has it yet.");
    } catch (error) {
      lines = [`The receipts did not come: ${error.message}.`];
    }
    const list = document.createElement("ul");
    for (const line of lines) list.appendChild(document.createElement("li")).textContent = line;
    entry.cell.replaceChildren(list);
  }
}
