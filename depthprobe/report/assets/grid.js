// One question's grid, tokens × depth: draws a view of it (items.js, patch.js), walks it with the keyboard, tells of a cell.
(() => {
  "use strict";
  const { escaped, visible } = window.depthprobe.questions;
  const [cells, tip] = ["cells", "tip"].map((id) => document.getElementById(id));

  let view; // what is drawn
  let lit = -1; // the row whose tracks are shown
  let told = null; // the cell that is told of

  /** The class of a role; a role of the user's own has none. */
  const roleClass = (role) => (/^[a-z]+$/.test(role) ? role : "");
  /** A line stands behind each loop's end. */
  const columnClass = (column) => (view.depth(column).end ? "end" : "");

  function draw(next) {
    [view, lit] = [next, -1];
    hide();
    const { axis, last } = view;
    const columns = axis.map((_, column) => column);
    const track = ({ name, label }) =>
      `<tr class="track" data-track="${name}"><th scope="row" class="token">${label}<small></small></th>${columns
        .map((column) => `<td class="${columnClass(column)}"></td>`).join("")}</tr>`;
    let html = `<table role="grid" aria-label="${view.caption}, a row for each token, a column for each depth" aria-rowcount="${last + 2}" aria-colcount="${axis.length + 1}">
      <thead><tr><th scope="col" class="token">token</th>${columns
        .map((column) => `<th scope="col" class="${columnClass(column)}" title="${view.depth(column).long}">${view.depth(column).short}</th>`)
        .join("")}</tr></thead><tbody>`;
    for (let row = 0; row <= last; row++) {
      html += `<tr data-row="${row}"${row === last ? ' class="asks"' : ""}><th scope="row" class="token stroke ${roleClass(view.role(row))}"><small>${view.position(row)}</small>${escaped(visible(view.token(row)))}</th>`;
      for (const column of columns) {
        html += `<td role="gridcell" tabindex="-1" data-column="${column}" class="${view.shade(row, column)} ${columnClass(column)}${view.leads(row, column) ? " leads" : ""}">${escaped(view.label(row, column))}</td>`;
      }
      html += "</tr>";
    }
    html += `</tbody><tfoot>${view.tracks.map(track).join("")}</tfoot></table>`;
    cells.style.setProperty("--columns", axis.length);
    cells.innerHTML = html;
    cells.scrollTop = cells.scrollHeight; // the answer is predicted at the end
    cells.scrollLeft = 0;
    stop(cellNode(last, axis.length - 1));
    for (const one of view.tracks) if (one.row !== undefined) bars(one, one.row);
    light(last);
  }

  function bars({ name, token, words, value }, row) {
    cells.querySelector(`[data-track=${name}] small`).textContent = `at ${view.position(row)}`;
    cells.querySelectorAll(`[data-track=${name}] td`).forEach((td, column) => {
      const p = value(row, column);
      td.innerHTML = p == null ? "" : `<i style="height:${(100 * p).toFixed(0)}%;background:var(--${token})"></i><span>${words(p)}</span>`;
    });
  }

  /** Show a row's own tracks, and its fact in the story. */
  function light(row) {
    if (row === lit) return;
    lit = row;
    cells.querySelector("tr.lit")?.classList.remove("lit");
    cells.querySelector(`tr[data-row="${row}"]`)?.classList.add("lit");
    for (const mark of document.querySelectorAll("#item-story mark.lit")) mark.classList.remove("lit");
    document.querySelector(`#item-story mark[data-fact="${view.fact(row)}"]`)?.classList.add("lit");
    for (const one of view.tracks) if (one.row === undefined) bars(one, row);
  }

  const cellNode = (row, column) => cells.querySelector(`tr[data-row="${row}"] td[data-column="${column}"]`);
  const place = (node) => [Number(node.parentNode.dataset.row), Number(node.dataset.column)];

  /** Exactly one cell is reached by Tab. */
  function stop(node) {
    cells.querySelector('td[tabindex="0"]')?.setAttribute("tabindex", "-1");
    node?.setAttribute("tabindex", "0");
  }

  // -- what a cell says ------------------------------------------------------------------------------------------------

  function show(node) {
    const [row, column] = place(node);
    const role = view.role(row);
    light(row);
    const html = `<p><b>${escaped(visible(view.token(row)))}</b> at ${view.position(row)}, ${view.depth(column).long}${role ? `, ${escaped(role)} fact` : ""}</p>${view.card(row, column)}`;
    tip.innerHTML = html;
    tip.hidden = false;
    told?.removeAttribute("aria-describedby");
    told = node;
    told.setAttribute("aria-describedby", "tip");
    settle();
  }

  /** Put the card beside its cell. */
  function settle() {
    const [at, own] = [told.getBoundingClientRect(), tip.getBoundingClientRect()];
    const left = Math.max(Math.min(at.left, document.documentElement.clientWidth - own.width - 8), 8);
    const below = at.bottom + own.height + 8 < innerHeight;
    const top = below ? at.bottom + 5 : Math.min(Math.max(at.top - own.height - 5, 8), innerHeight - own.height - 8);
    tip.style.transform = `translate(${Math.round(left)}px,${Math.round(top)}px)`;
  }

  function hide() {
    tip.hidden = true;
    told?.removeAttribute("aria-describedby");
    told = null;
  }

  function leave() {
    const focused = cells.querySelector("td[data-column]:focus");
    if (focused) show(focused);
    else {
      hide();
      light(view.last);
    }
  }

  function walk(event) {
    const node = event.target.closest("td[data-column]");
    if (!node) return;
    const [row, column] = place(node);
    const end = view.axis.length - 1;
    const to = {
      ArrowDown: [row + 1, column], ArrowUp: [row - 1, column], ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1],
      PageDown: [row + 10, column], PageUp: [row - 10, column],
      Home: [event.ctrlKey ? 0 : row, 0], End: [event.ctrlKey ? view.last : row, end],
    }[event.key];
    if (event.key === "Escape") hide();
    if (!to) return;
    event.preventDefault();
    const next = cellNode(Math.min(Math.max(to[0], 0), view.last), Math.min(Math.max(to[1], 0), end));
    stop(next);
    next.focus();
  }

  const cellOf = (event) => event.target.closest?.("td[data-column]");
  cells.addEventListener("pointerover", (event) => { if (cellOf(event)) show(cellOf(event)); });
  cells.addEventListener("pointerleave", leave);
  cells.addEventListener("focusin", (event) => {
    if (!cellOf(event)) return;
    stop(cellOf(event));
    show(cellOf(event));
  });
  cells.addEventListener("focusout", (event) => {
    if (event.relatedTarget?.closest?.("#cells td")) return;
    hide();
    light(view.last);
  });
  cells.addEventListener("click", (event) => cellOf(event)?.focus());
  cells.addEventListener("keydown", walk);
  // a cell walked to scrolls into view and keeps its card; one that scrolls away from the pointer loses it
  const scrolled = () => {
    if (!told) return;
    if (told === document.activeElement || told.matches(":hover")) settle();
    else hide();
  };
  cells.addEventListener("scroll", scrolled, { passive: true });
  window.addEventListener("scroll", scrolled, { passive: true });

  // -- saving --------------------------------------------------------------------------------------------------------

  const quoted = (value) => (/[",\r\n]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : String(value));

  function csv() {
    const { item, axis, last } = view;
    const lines = [["item", "position", "token", "depth", "loop", "layer", "site", ...view.names].join(",")];
    for (let row = 0; row <= last; row++) {
      axis.forEach((index, column) => {
        const { loop, layer, site } = view.depth(column);
        const own = view.fields(row, column);
        if (own) lines.push([item.id, view.position(row), view.token(row), index, loop, layer, site, ...own].map(quoted).join(","));
      });
    }
    return `${lines.join("\n")}\n`;
  }

  /** The grid as a plotly heat map, for pictures; the page's own is a table, so that it can be walked. */
  function drawing() {
    const columns = view.axis.map((_, column) => column);
    const rows = Array.from({ length: view.last + 1 }, (_, row) => row);
    const each = (cell) => rows.map((row) => columns.map((column) => cell(row, column)));
    const common = { showgrid: false, zeroline: false, tickmode: "array", tickfont: { size: 11, color: "var(--soft)" } };
    const words = each((row, column) => {
      const word = view.label(row, column);
      const shown = escaped(word.length > 11 ? `${word.slice(0, 10)}…` : word);
      const [kind, step] = [view.shade(row, column)[0] === "c" ? "cold" : "heat", view.shade(row, column).slice(1) || 0];
      return `<span style="color:var(--on-${kind}-${step})">${view.leads(row, column) ? `<b>▣ ${shown}</b>` : shown}</span>`;
    });
    const heat = Array.from({ length: 9 }, (_, i) => [i / 8, `var(--heat-${i})`]);
    const both = [...[4, 3, 2, 1].map((i) => [0.5 - i / 8, `var(--cold-${i})`]), ...heat.map(([at, token]) => [0.5 + at / 2, token])];
    const scale = view.scale === "heat" ? { zmin: 0, zmax: 1, colorscale: heat } : { zmin: -1, zmax: 1, colorscale: both };
    const title = { text: window.depthprobe.questions.axisTitle, font: { size: 12.5, color: "var(--soft)" } };
    return window.depthprobe.resolve({
      data: [
        {
          type: "heatmap", z: each(view.number), ...scale, showscale: false, xgap: 1, ygap: 1, hoverongaps: false,
          text: words, texttemplate: "%{text}", textfont: { size: 10.5 },
        },
      ],
      layout: {
        height: 24 * rows.length + 66,
        margin: { l: 120, r: 14, t: 8, b: 58 },
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--ink)" },
        xaxis: { ...common, title, tickvals: columns, ticktext: columns.map((column) => view.depth(column).short) },
        yaxis: {
          ...common, tickvals: rows, range: [rows.length - 0.5, -0.5],
          ticktext: rows.map((row) => `${escaped(visible(view.token(row)))} ${view.position(row)}`),
        },
      },
    });
  }

  window.depthprobe.exports.set("item-figure", () => ({
    file: view.file,
    title: `${view.item.id}: ${view.title ?? view.item.answer}`, // a question of six hops is wider than a picture
    width: Math.max(134 + 78 * view.axis.length, 560),
    spec: drawing(),
    csv: csv(),
  }));

  window.depthprobe.grid = { draw, hide, roleClass };
})();
