// The questions of the page: unpacks them (see report/browser.py) and says what stands at a token and a depth.
(() => {
  "use strict";
  const RANKS = 5;
  const NO_GATE = 65535;

  const NAMES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escaped = (text) => text.replace(/[&<>"]/g, (c) => NAMES[c]);
  const percent = (p) => {
    const shown = 100 * p;
    return `${shown.toFixed(shown >= 0.95 || shown === 0 ? 0 : shown >= 0.05 ? 1 : 2)}\u202f%`;
  };
  const two = (p) => (p == null ? "–" : p.toFixed(2));
  const visible = (word) => {
    const shown = word.trim();
    return shown || (word.includes("\n") ? "↵" : word ? "␣" : "");
  };
  const exact = (word) => escaped(word.replace(/\n/g, "↵")).replace(/^ +| +$/g, (s) => "·".repeat(s.length));

  let data; // the header
  let planes; // its numbers: words of ranks 1…5, probabilities of ranks 1…5, gate λ, gate CDF

  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("items-data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let at = 4 + length;
    planes = data.planes.map(([kind, count]) => {
      at += (4 - (at % 4)) % 4;
      const plane = new { uint16: Uint16Array, uint32: Uint32Array }[kind](buffer, at, count);
      at += plane.byteLength;
      return plane;
    });
    data.items.forEach((one, number) => {
      one.number = number;
      one.hay = `${one.id} ${one.text} ${one.answer}`.toLowerCase();
    });
    return data;
  }

  /**
   * One question read by the lens: what grid.js draws of it, by row (a token) and column (a depth of its axis). Other
   * views of a question (patch.js) have the same members.
   */
  function view(item) {
    const axis = data.axes[item.axis];
    const at = (row, column) => item.cell + row * axis.length + column;
    const last = item.positions.length - 1;
    const word = (row, column, rank = 0) => data.words[planes[rank][at(row, column)]];
    const depth = (column) => data.depths[axis[column]];
    const prob = (row, column, rank = 0) => planes[RANKS + rank][at(row, column)] / 65535;
    const p = (column) => item.p[axis[column]];
    /** λ (0) or CDF (1); null where there is no gate. */
    const gate = (row, column, which) => {
      const value = data.gate ? planes[2 * RANKS + which][at(row, column)] : NO_GATE;
      return value === NO_GATE ? null : value / 65534;
    };
    /** Whether the answer leads there: by its rank where it is predicted, by its text elsewhere. */
    const leads = (row, column) => (row === last ? item.rank[axis[column]] === 0 : word(row, column).trim() === item.answer);
    const tracks = [{ name: "p", label: "p(answer)", token: "model", words: percent, row: last, value: (_, column) => p(column) }];
    if (data.gate) {
      ["λ", "CDF"].forEach((letter, which) => {
        tracks.push({ name: ["lambda", "cdf"][which], label: `gate ${letter}`, token: "gate", words: two, value: (row, column) => gate(row, column, which) });
      });
    }
    const names = [];
    for (let rank = 1; rank <= RANKS; rank++) names.push(`top${rank}`, `p${rank}`);
    if (data.gate) names.push("gate_lambda", "gate_cdf");
    return {
      item, axis, last, depth, leads, tracks, names,
      file: item.id,
      caption: "Leading words",
      scale: "heat",
      position: (row) => item.positions[row],
      token: (row) => data.words[item.tokens[row]],
      fact: (row) => item.facts_of[row],
      role: (row) => item.facts[item.facts_of[row]]?.[2] ?? "",
      label: (row, column) => visible(word(row, column)),
      shade: (row, column) => `h${Math.round(8 * prob(row, column))}`,
      number: prob,
      card(row, column) {
        let html = "<ol>";
        for (let rank = 0; rank < RANKS; rank++) {
          const [said, share] = [word(row, column, rank), prob(row, column, rank)];
          if (said) html += `<li><i style="width:${(100 * share).toFixed(1)}%"></i><span>${exact(said)}</span><b>${percent(share)}</b></li>`;
        }
        html += "</ol>";
        if (row === last) html += `<p class="soft">${escaped(item.answer)}: ${percent(p(column))}, rank ${item.rank[axis[column]] + 1}</p>`;
        const [lambda, cdf] = [0, 1].map((which) => gate(row, column, which));
        return lambda == null ? html : `${html}<p class="soft">gate λ ${two(lambda)}, CDF ${two(cdf)}</p>`;
      },
      fields(row, column) {
        const line = [];
        for (let rank = 0; rank < RANKS; rank++) line.push(word(row, column, rank), prob(row, column, rank).toFixed(5));
        if (data.gate) line.push(...[0, 1].map((which) => gate(row, column, which)?.toFixed(5) ?? ""));
        return line;
      },
    };
  }

  window.depthprobe.questions = { plane: (number) => planes[number], unpack, view, escaped, percent, two, visible, exact };
})();
