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

  /** One question: what its grid holds, by row (a token) and column (a depth of its axis). */
  function view(item) {
    const axis = data.axes[item.axis];
    const at = (row, column) => item.cell + row * axis.length + column;
    const last = item.positions.length - 1;
    const word = (row, column, rank = 0) => data.words[planes[rank][at(row, column)]];
    const depth = (column) => data.depths[axis[column]];
    return {
      item,
      axis,
      last, // the row that predicts the answer
      depth,
      word,
      prob: (row, column, rank = 0) => planes[RANKS + rank][at(row, column)] / 65535,
      /** λ (0) or CDF (1); null where there is no gate. */
      gate(row, column, which) {
        const value = data.gate ? planes[2 * RANKS + which][at(row, column)] : NO_GATE;
        return value === NO_GATE ? null : value / 65534;
      },
      token: (row) => data.words[item.tokens[row]],
      role: (row) => item.facts[item.facts_of[row]]?.[2] ?? "",
      p: (column) => item.p[axis[column]],
      rank: (column) => item.rank[axis[column]],
      /** Whether the answer leads there: by its rank where it is predicted, by its text elsewhere. */
      leads: (row, column) => (row === last ? item.rank[axis[column]] === 0 : word(row, column).trim() === item.answer),
    };
  }

  window.depthprobe.questions = { RANKS, unpack, view, escaped, percent, two, visible, exact };
})();
