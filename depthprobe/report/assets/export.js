// Saves figures: PNG and SVG as drawn, with title and legend; CSV as the numbers behind the drawing.
(() => {
  "use strict";
  const { name, picksOf, specOf, resolve } = window.depthprobe;
  const sheets = JSON.parse(document.getElementById("sheets").textContent);
  const sources = new Map(); // id of a figure that another script draws -> () => ({ file, title, spec, legend, csv })
  const GLYPHS = { dot: "●", ring: "◯", triangle: "▲", cross: "✕", diamond: "◆", "diamond-open": "◇", "square-open": "□", tick: "|", leads: "▣", unrun: "▨" };
  const TITLE = 62; // pixels above the plot for title and legend

  const escaped = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const plain = (text) => text.normalize("NFKD").replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "figure";

  /** The page's legend of a figure as a line of plotly's markup. */
  function legend(figure) {
    const coloured = (token, glyph) => `<span style="color:var(--${token})">${glyph}</span>`;
    const token = (node) => (/--([a-z0-9-]+)\)/.exec(node.getAttribute("style") ?? "") ?? [])[1] ?? "ink";
    const parts = [...figure.querySelectorAll(".keys:not([hidden]) .key")].map((key) => {
      if (key.querySelector(".ramp")) {
        const ramp = (cold) => (cold ? [4, 3, 2, 1].map((i) => `cold-${i}`) : [0, 1, 2, 3, 4, 5, 6, 7, 8].map((i) => `heat-${i}`));
        const part = (node) =>
          node.tagName === "I" ? ramp(node.classList.contains("cold")).map((one) => coloured(one, "■")).join("") : escaped(node.textContent);
        return [...key.children].map(part).join(" ");
      }
      const mark = key.querySelector("i");
      const kind = [...mark.classList].find((c) => c in GLYPHS);
      return `${coloured(kind === "leads" ? "rival" : token(mark), GLYPHS[kind] ?? "■")} ${escaped(key.textContent.trim())}`;
    });
    const hops = figure.closest(".block")?.querySelectorAll(".hops .chip[aria-pressed=true]") ?? [];
    for (const [what, words] of picksOf(figure)) parts.push(escaped(`${what}: ${words}`));
    for (const chip of hops) parts.push(`${coloured(token(chip), "━")} k = ${chip.dataset.hop}`);
    return parts.join("    ");
  }

  async function picture(format, { spec, title, line, width }) {
    const { data, layout } = spec;
    const top = (layout.margin.t ?? 0) + TITLE;
    const height = layout.height + TITLE;
    const words = { showarrow: false, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", align: "left" };
    const left = -layout.margin.l + 16;
    const drawn = resolve({
      ...layout,
      width,
      height,
      autosize: false,
      paper_bgcolor: "var(--card)",
      margin: { ...layout.margin, t: top },
      annotations: [
        ...(layout.annotations ?? []),
        { ...words, xshift: left, yshift: TITLE - 24, text: `<b>${escaped(title)}</b>`, font: { size: 15, color: "var(--ink)" } },
        { ...words, xshift: left, yshift: TITLE - 48, text: line, font: { size: 12, color: "var(--soft)" } },
      ],
    });
    const url = await Plotly.toImage({ data, layout: drawn }, { format, width, height, scale: format === "png" ? 2 : 1 });
    const body = url.slice(url.indexOf(",") + 1);
    if (format === "svg") return new Blob([decodeURIComponent(body)], { type: "image/svg+xml" });
    return new Blob([Uint8Array.from(atob(body), (c) => c.charCodeAt(0))], { type: "image/png" });
  }

  function download(blob, file) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  async function save(kind, figure) {
    const source = sources.get(figure.id)?.();
    const file = `${plain(name)}-${plain(source?.file ?? figure.id)}.${kind}`;
    if (kind === "csv") {
      download(new Blob([source ? source.csv : sheets[figure.id]], { type: "text/csv" }), file);
      return;
    }
    const box = figure.querySelector(".plot");
    const wide = source?.width ?? Math.max(box.clientWidth, 560);
    const spec = source?.spec ?? specOf(figure.id);
    const title = source?.title ?? figure.querySelector("h4").textContent;
    download(await picture(kind, { spec, title, line: resolve(legend(figure)), width: wide }), file);
  }

  for (const group of document.querySelectorAll(".save")) {
    group.hidden = false;
    group.addEventListener("click", async (event) => {
      const button = event.target.closest("[data-save]");
      if (!button || button.getAttribute("aria-busy")) return;
      button.setAttribute("aria-busy", "true");
      try {
        await save(button.dataset.save, group.closest("figure, .words"));
      } finally {
        button.removeAttribute("aria-busy");
      }
    });
  }

  window.depthprobe.exports = sources;
})();
