// Rows of a table that change in place: focus, selection and what a screen reader is at stay where they are.

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export class Rows {
  /**
   * @param {HTMLElement} body the tbody.
   * @param {(item: object) => string} key
   * @param {Array<{text: (item: object) => string, isNumber?: boolean, warns?: (item: object) => boolean}>} columns
   *   the first one is the row's header.
   */
  constructor(body, key, columns) {
    this.body = body;
    this.key = key;
    this.columns = columns;
    this.rows = new Map();
  }

  show(items) {
    const seen = new Set();
    let previous = null;
    for (const item of items) {
      const key = this.key(item);
      seen.add(key);
      const row = this.rows.get(key) ?? this.#make(key);
      this.columns.forEach((column, i) => {
        setText(row.cells[i], column.text(item));
        row.cells[i].classList.toggle("warn", column.warns?.(item) ?? false);
      });
      const place = previous ? previous.nextSibling : this.body.firstChild;
      if (place !== row) this.body.insertBefore(row, place);
      previous = row;
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
  }

  #make(key) {
    const row = document.createElement("tr");
    this.columns.forEach((column, i) => {
      const cell = document.createElement(i ? "td" : "th");
      if (!i) cell.scope = "row";
      if (column.isNumber) cell.className = "number";
      row.append(cell);
    });
    this.rows.set(key, row);
    return row;
  }
}
