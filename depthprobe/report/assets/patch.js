// One question patched token by token: the view that grid.js draws of another story's state at each token and depth.
(() => {
  "use strict";
  const { escaped, percent, plane } = window.depthprobe.questions;
  const NOTHING = 65535; // an effect that is not told, or a place where nothing was run
  const REACH = 4; // effects are packed from -REACH to REACH

  const two = (value) => (value == null ? "–" : value.toFixed(2).replace(/^-(?=0\.00$)/, "").replace("-", "−"));

  /** The ways in which a question was patched: [[its number among item.patches, its words], …]. */
  const waysOf = (item, data) => item.patches.map((patch, number) => [number, data.ways[patch.way].words]);

  function view(item, data, number) {
    const patch = item.patches[number];
    const way = data.ways[patch.way];
    const axis = data.axes[patch.axis];
    // with all tokens known the untouched ones keep their rows: what was not run shows as such
    const all = item.prompt?.map((token, position) => ({ token, position, fact: item.prompt_facts[position] }));
    const read = item.full ? item.positions.map((position, row) => ({ token: data.words[item.tokens[row]], position, fact: item.facts_of[row] })) : null;
    const rows = all ?? read ?? patch.positions.map((position) => ({ token: "", position, fact: -1 }));
    const place = rows.map(({ position }) => patch.positions.indexOf(position));
    const last = rows.length - 1;
    const value = (which, row, column) => {
      if (place[row] < 0) return NOTHING;
      return plane(data.patched + which)[patch.cell + place[row] * axis.length + column];
    };
    const effect = (row, column) => {
      const packed = value(0, row, column);
      return packed === NOTHING ? null : (packed / 65534) * 2 * REACH - REACH;
    };
    const ran = (row, column) => value(3, row, column) < 2;
    const flips = (row, column) => value(3, row, column) === 1;
    const share = (which, row, column) => value(which, row, column) / 65535;
    return {
      item, axis, last,
      file: `${item.id}-patching-${way.donor_kind}-${way.site}`,
      title: `effect of ${way.words}`,
      caption: "Normalised effect of a patch",
      scale: "effect",
      names: ["donor_kind", "direction", "kind", "span", "patched_site", "effect", "p_answer", "p_donor", "flip"],
      tracks: [],
      depth: (column) => data.depths[axis[column]],
      position: (row) => rows[row].position,
      token: (row) => rows[row].token,
      fact: (row) => rows[row].fact,
      role: (row) => item.facts[rows[row].fact]?.[2] ?? "",
      // what the donor's story has instead
      note: patch.before ? `The donor's story has “${patch.after}” for “${patch.before}”; its answer is ${patch.answer}.` : "",
      leads: (row, column) => ran(row, column) && flips(row, column),
      label: (row, column) => (ran(row, column) ? two(effect(row, column)) : ""),
      shade(row, column) {
        const found = effect(row, column);
        if (found == null) return ran(row, column) ? "h0" : "unrun";
        return found < -0.06 ? `c${Math.max(Math.min(Math.round(-4 * found), 4), 1)}` : `h${Math.max(Math.min(Math.round(8 * found), 8), 0)}`;
      },
      number: effect,
      card(row, column) {
        if (!ran(row, column)) return '<p class="soft">Nothing was patched here.</p>';
        return `<ol><li><span>effect</span><b>${two(effect(row, column))}</b></li>
          <li><i style="width:${100 * share(1, row, column)}%"></i><span>${escaped(item.answer)}, the answer</span><b>${percent(share(1, row, column))}</b></li>
          <li><i style="width:${100 * share(2, row, column)}%"></i><span>${patch.answer ? `${escaped(patch.answer)}, the donor's` : "the donor's answer"}</span><b>${percent(share(2, row, column))}</b></li></ol>
          ${flips(row, column) ? '<p class="soft">The best candidate flips to the donor\'s answer.</p>' : ""}`;
      },
      fields(row, column) {
        if (!ran(row, column)) return null;
        const numbers = [effect(row, column)?.toFixed(4) ?? "", share(1, row, column).toFixed(5), share(2, row, column).toFixed(5)];
        return [way.donor_kind, way.direction, way.kind, way.span, way.site, ...numbers, flips(row, column)];
      },
    };
  }

  window.depthprobe.patches = { view, waysOf };
})();
