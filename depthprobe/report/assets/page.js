// Draws the figures in the colours of the current theme. Colours stand in the figures as var(--name) and are looked up in the style sheet.
(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const name = JSON.parse(document.getElementById("run-name").textContent); // of saved files
  const hidden = new Map(); // section -> hops that are switched off
  const PRINT_WIDTH = 630; // pixels: a sheet of A4 within its margins

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    scrollZoom: false,
    doubleClick: false,
    showTips: false,
  };

  function resolve(node, style) {
    if (typeof node === "string") {
      return node.includes("var(--")
        ? node.replace(/var\((--[a-z0-9-]+)\)/g, (_, name) => style.getPropertyValue(name).trim())
        : node;
    }
    if (Array.isArray(node)) return node.map((value) => resolve(value, style));
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, resolve(value, style)]));
    }
    return node;
  }

  /** A figure's data and layout in the colours of the theme, without the rungs that are switched off. */
  function specOf(id) {
    const { data, layout } = resolve(figures[id], getComputedStyle(root));
    const off = hidden.get(document.getElementById("plot-" + id).closest("[data-section]").dataset.section);
    for (const trace of data) {
      if (off && trace.meta && off.has(String(trace.meta.hop))) trace.visible = false;
    }
    return { data, layout };
  }

  function draw(width) {
    return Promise.all(
      Object.keys(figures).map((id) => {
        const { data, layout } = specOf(id);
        if (width) layout.width = width;
        layout.autosize = !width;
        return Plotly.react(document.getElementById("plot-" + id), data, layout, config);
      }),
    );
  }

  // theme: the viewer's preference, until the button is pressed; the choice is kept where the browser allows it
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : preference.matches);
  const store = {
    get: () => { try { return localStorage.getItem("depthprobe-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("depthprobe-theme", value); } catch { /* private window */ } },
  };

  function show() {
    const next = isDark() ? "light" : "dark";
    button.querySelector(".word").textContent = next === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to the ${next} theme`);
    return draw();
  }

  const kept = store.get();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store.set(root.dataset.theme);
    show();
  });
  preference.addEventListener("change", show);

  // hops: a press hides or shows a rung in all curves of its section
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const section = chip.closest("[data-section]").dataset.section;
      const off = hidden.get(section) ?? new Set();
      hidden.set(section, off);
      const showing = off.delete(chip.dataset.hop);
      if (!showing) off.add(chip.dataset.hop);
      chip.setAttribute("aria-pressed", String(showing));
      draw();
    });
  }

  // paper is white and narrow
  let before;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    draw(PRINT_WIDTH);
  });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    draw();
  });

  // what export.js and browser.js need
  window.depthprobe = {
    name,
    specOf,
    resolve: (node) => resolve(node, getComputedStyle(root)),
    drawn: show().then(() => { root.dataset.ready = "true"; }),
  };
})();
