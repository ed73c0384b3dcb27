// What can be computed of a page's accessibility: contrast, names, ids, tables, sizes. Returns what it found.
() => {
  const luminance = (rgb) => {
    const parts = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const parse = (text) => text.match(/[\d.]+/g).map(Number);
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const isSeen = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 1;
  const faint = [];
  let checked = 0;
  for (const e of document.body.querySelectorAll("*")) {
    const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const style = getComputedStyle(e);
    if (!isSeen(e)) continue;
    if (hasText || ["INPUT", "SELECT"].includes(e.tagName)) {
      checked += 1;
      const color = parse(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
      if (ratio(color, ground(e)) < 4.5) faint.push(`${e.tagName}#${e.id} ${e.textContent.slice(0, 30)} ${ratio(color, ground(e))}`);
    }
    if (["INPUT", "SELECT", "BUTTON"].includes(e.tagName) && parseFloat(style.borderTopWidth)) {
      const edge = Math.max(ratio(parse(style.borderTopColor).slice(0, 3), ground(e.parentElement)), ratio(ground(e), ground(e.parentElement)));
      if (edge < 3) faint.push(`edge of ${e.tagName}#${e.id} ${edge}`);
    }
    if (e.classList.contains("line") && ratio(parse(style.stroke).slice(0, 3), ground(e)) < 3) faint.push("line of a plot");
  }
  const named = (e) =>
    (e.getAttribute("aria-label") || "").trim() ||
    (e.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("").trim() ||
    [...(e.labels ?? [])].map((l) => l.textContent).join("").trim() ||
    (["BUTTON", "A", "SUMMARY"].includes(e.tagName) ? e.textContent.trim() : "");
  const all = (selector) => [...document.querySelectorAll(selector)];
  const ids = all("[id]").map((e) => e.id);
  const repeated = (names) => names.filter((name, i) => names.indexOf(name) !== i);
  return {
    checked,
    faint,
    nameless: all("button, select, input, a, summary, [role=slider], [role=region], [role=img], section").filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 80)),
    twice: repeated(ids),
    // Landmarks of one role have different names.
    twins: repeated(all("header, main, footer, nav, aside, section, [role=region], [role=navigation]").filter(isSeen).map((e) => `${e.tagName} ${named(e)}`)),
    dangling: all("[aria-controls], [aria-describedby], [aria-labelledby]").flatMap((e) =>
      ["aria-controls", "aria-describedby", "aria-labelledby"].flatMap((name) => (e.getAttribute(name) ?? "").split(" ").filter(Boolean))
    ).filter((id) => !document.getElementById(id)),
    headings: all("h1, h2, h3").filter(isSeen).map((e) => e.tagName),
    headless: all("td").filter((e) => !e.closest("table").querySelector("thead th[scope=col]") || (e.cellIndex > 0 && !e.parentElement.querySelector("th[scope=row]"))).length,
    loud: all("[aria-live]:not([aria-live=off]), [role=log], [role=timer]").map((e) => e.id),
    small: all("button, select, summary").filter(isSeen).filter((e) => e.getBoundingClientRect().height < 24 || e.getBoundingClientRect().width < 24).map((e) => e.outerHTML.slice(0, 60)),
    language: document.documentElement.lang,
    landmarks: ["header", "main", "footer"].map((name) => all(name).length),
    titled: document.title,
  };
}
