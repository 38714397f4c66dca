// Sets the theme before anything is drawn; "system" leaves it to prefers-color-scheme.
"use strict";
(() => {
  const name = "ccjax.theme";
  const order = ["system", "light", "dark"];
  let theme = "system";
  try {
    theme = localStorage.getItem(name) ?? "system";
  } catch {
    /* no storage: the theme lasts as long as the page */
  }
  if (!order.includes(theme)) theme = "system";

  function apply() {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = order[(order.indexOf(theme) + 1) % order.length];
      try {
        localStorage.setItem(name, theme);
      } catch {
        /* as above */
      }
      apply();
    });
  });
})();
