// Draws the figures in the colours of the current theme. Colours stand in the figures as var(--name) and are looked up in the style sheet.
(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const name = JSON.parse(document.getElementById("run-name").textContent); // of saved files
  const hidden = new Map(); // section -> hops that are switched off
  const picks = new Map(); // block -> what is picked for its figures, by the key of the choice
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

  const agrees = (when, picked) => Object.entries(when).every(([key, value]) => !(key in picked) || picked[key] === value);

  /** A figure's data and layout in the colours of the theme: what is picked, without the rungs that are switched off. */
  function specOf(id) {
    const { data, layout } = resolve(figures[id], getComputedStyle(root));
    const plot = document.getElementById("plot-" + id);
    const off = hidden.get(plot.closest("[data-section]").dataset.section);
    const picked = picks.get(plot.closest(".block"));
    for (const trace of data) {
      const { hop, when } = trace.meta ?? {};
      if (when && picked) trace.visible = agrees(when, picked);
      if (off?.has(String(hop))) trace.visible = false;
    }
    if (data.every((trace) => trace.visible === false && trace.meta?.when)) {
      const words = { text: "Nothing was run here: pick another.", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
      layout.annotations = [...(layout.annotations ?? []), { ...words, font: { size: 14, color: layout.font.color } }];
    }
    return { data, layout };
  }

  function draw(width, ids = Object.keys(figures)) {
    return Promise.all(
      ids.map((id) => {
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

  // choices: one option at a time, for all figures of a block and their tables
  function rows(block) {
    for (const row of block.querySelectorAll("tr[data-when]")) {
      row.hidden = !agrees(Object.fromEntries(new URLSearchParams(row.dataset.when)), picks.get(block));
    }
  }

  for (const bar of document.querySelectorAll(".block > .choices")) {
    const block = bar.parentNode;
    const picked = {};
    picks.set(block, picked);
    for (const select of bar.querySelectorAll("select")) picked[select.dataset.choice] = select.value;
    for (const button of bar.querySelectorAll("[aria-pressed=true]")) picked[button.dataset.choice] = button.value;
    rows(block);
    const pick = ({ dataset, value }) => {
      picked[dataset.choice] = value;
      rows(block);
      draw(0, [...block.querySelectorAll("figure")].map((figure) => figure.id));
    };
    bar.addEventListener("change", (event) => pick(event.target));
    bar.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const other of button.parentNode.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      pick(button);
    });
    // a group of buttons is walked with the arrows as well
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.target.tagName !== "BUTTON") return;
      const next = event.target[step > 0 ? "nextElementSibling" : "previousElementSibling"];
      if (next?.tagName !== "BUTTON") return;
      event.preventDefault();
      next.focus();
      next.click();
    });
  }

  /** What is picked for a figure, in words: [["hops k", "3"], …]. */
  function picksOf(figure) {
    return [...(figure.closest(".block")?.querySelectorAll(":scope > .choices > *") ?? [])].map((one) => [
      one.querySelector("span").textContent,
      one.querySelector("[aria-pressed=true], option:checked").textContent,
    ]);
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
    picksOf,
    specOf,
    resolve: (node) => resolve(node, getComputedStyle(root)),
    drawn: show().then(() => { root.dataset.ready = "true"; }),
  };
})();
