// Light, dark, or as the system says. No module: it runs before the first paint, so that nothing flashes.
(() => {
  "use strict";
  const KEY = "cormorant-theme";
  const stored = () => {
    try {
      return localStorage.getItem(KEY) ?? "system";
    } catch {
      return "system"; // storage is forbidden here
    }
  };
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = stored();
    choice.addEventListener("change", () => {
      apply(choice.value);
      try {
        localStorage.setItem(KEY, choice.value);
      } catch {
        // It holds for this visit.
      }
    });
  });
})();
