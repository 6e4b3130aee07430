// The item browser: finds questions, picks one, shows its story, and has its grid drawn.
(() => {
  "use strict";
  const { drawn, grid, patches, questions } = window.depthprobe;
  const { escaped, visible } = questions;
  const $ = (id) => document.getElementById(id);
  const [box, find, found, said] = ["browser", "find", "found", "said"].map($);
  const filters = { task: $("by-task"), hops: $("by-hops"), verdict: $("by-verdict") };
  const ROW = 58; // pixels of a question in the list, as in the style sheet

  let data; // what items.js unpacked
  let hits = []; // numbers of the questions found
  let active = 0; // place in hits
  let item; // the question picked
  let patched = false; // its patches are shown, not the lens
  const [views, ways] = ["item-views", "item-ways"].map($); // absent on a page without patches

  const verdict = (one) => (one.right ? "right" : "wrong");
  const tick = (one) => `<i class="${verdict(one)}" aria-hidden="true">${one.right ? "✓" : "✗"}</i>`;

  // -- the list ------------------------------------------------------------------------------------------------------

  /** What a word of the search asks of a question. */
  function test(word) {
    const k = /^k=?(\d+)$/.exec(word);
    if (k) return (one) => one.k === Number(k[1]);
    if (word === "right" || word === "wrong") return (one) => verdict(one) === word;
    return (one) => one.hay.includes(word);
  }

  function search() {
    const tests = find.value.toLowerCase().split(/\s+/).filter(Boolean).map(test);
    if (filters.task?.value) tests.push((one) => one.task === filters.task.value);
    if (filters.hops.value) tests.push((one) => one.k === Number(filters.hops.value));
    if (filters.verdict.value) tests.push((one) => verdict(one) === filters.verdict.value);
    hits = data.items.filter((one) => tests.every((asks) => asks(one))).map((one) => one.number);
    active = Math.max(hits.indexOf(item?.number ?? -1), 0);
    said.textContent = hits.length ? `${hits.length} of ${data.items.length}` : "Nothing found.";
    found.scrollTop = 0;
    reveal();
  }

  /** Draw the rows in view, and a few beyond. */
  function list() {
    const first = Math.max(Math.floor(found.scrollTop / ROW) - 4, 0);
    const end = Math.min(first + Math.ceil(found.clientHeight / ROW) + 8, hits.length);
    let html = `<div role="presentation" style="height:${hits.length * ROW}px"></div>`;
    for (let i = first; i < end; i++) {
      const one = data.items[hits[i]];
      html += `<div class="hit${i === active ? " active" : ""}" role="option" id="hit-${i}" data-at="${i}" aria-selected="${one === item}" aria-posinset="${i + 1}" aria-setsize="${hits.length}" style="top:${i * ROW}px">
        <span class="asked"><span>${escaped(one.question)}</span> <b>${escaped(one.answer)}</b></span>
        <span class="of">${tick(one)}${verdict(one)}, k = ${one.k} <code>${escaped(one.id)}</code></span></div>`;
    }
    found.innerHTML = html;
    for (const owner of [find, found]) {
      if (hits.length) owner.setAttribute("aria-activedescendant", `hit-${active}`);
      else owner.removeAttribute("aria-activedescendant");
    }
  }

  function reveal() {
    const top = active * ROW;
    if (top < found.scrollTop) found.scrollTop = top;
    else if (top + ROW > found.scrollTop + found.clientHeight) found.scrollTop = top + ROW - found.clientHeight;
    list();
  }

  function move(event) {
    const page = Math.max(Math.floor(found.clientHeight / ROW) - 1, 1);
    const to = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page }[event.key];
    if (to !== undefined) {
      active = Math.min(Math.max(to, 0), Math.max(hits.length - 1, 0));
      reveal();
    } else if (event.key === "Enter") {
      if (hits.length) pick(hits[active], true);
    } else if (event.key === "Escape" && find.value) {
      find.value = "";
      search();
    } else if (event.key === "Escape") document.activeElement.blur();
    else return;
    event.preventDefault();
  }

  // -- one question --------------------------------------------------------------------------------------------------

  function pick(number, asked) {
    item = data.items[number];
    const at = hits.indexOf(number);
    if (at >= 0) active = at;
    reveal();
    head();
    story();
    offer();
    show();
    if (!asked) return;
    history.replaceState(null, "", `#item=${encodeURIComponent(item.id)}`);
    said.textContent = `${hits.length} of ${data.items.length}; picked ${item.id}, ${verdict(item)}`;
  }

  /** The ways in which the question was patched; the one shown before, if it has it. */
  function offer() {
    if (!views) return;
    const before = ways.selectedOptions[0]?.textContent;
    const found = patches.waysOf(item, data);
    ways.innerHTML = found.map(([number, words]) => `<option value="${number}"${words === before ? " selected" : ""}>${escaped(words)}</option>`).join("");
    views.querySelector("[value=patching]").disabled = !found.length;
  }

  /** Draw the grid: the lens, or the patches where they are asked for and the question has some. */
  function show() {
    const shown = patched && item.patches?.length > 0;
    const by = data.unit === "loop" ? "loop" : "layer";
    const lens = item.full ? `Leading words, token by ${by}` : `Leading words at the answer's place, by ${by}`;
    $("item-title").textContent = shown ? `Effect of a patch, token by ${by}` : lens;
    if (views) {
      for (const button of views.querySelectorAll("button")) button.setAttribute("aria-pressed", String((button.value === "patching") === shown));
      $("item-way").hidden = !shown;
      for (const key of document.querySelectorAll("#item-figure [data-view]")) key.hidden = (key.dataset.view === "patching") !== shown;
    }
    const view = shown ? patches.view(item, data, Number(ways.value)) : questions.view(item);
    if (views) $("item-note").textContent = view.note ?? "";
    grid.draw(view);
  }

  function head() {
    const rungs = data.items.filter((one) => one.story === item.story && one.task === item.task);
    const depth = (index) => (index == null ? "never" : data.depths[index].long);
    const facts = [
      ["answer", item.answer],
      ["top word at full depth", visible(item.said)],
      ["settles at", depth(item.settled)],
      ["right from", depth(item.correct)],
    ];
    if (item.exit != null) facts.push(["gate leaves at", `loop ${item.exit}`]);
    const buttons = rungs.map(
      (one) => `<button type="button" data-number="${one.number}" aria-pressed="${one === item}" aria-label="k = ${one.k}, ${verdict(one)}">${one.k}${tick(one)}</button>`,
    );
    const others = rungs.length > 1 ? `<div class="rungs" role="group" aria-label="The same story at other hops"><span>k</span>${buttons.join("")}</div>` : "";
    $("item-head").innerHTML = `<p class="of">${tick(item)}<b>${verdict(item)}</b> ${escaped(item.task)}, k = ${item.k} <code>${escaped(item.id)}</code></p>${others}
      <dl>${facts.map(([label, value]) => `<div><dt>${label}</dt><dd>${escaped(value)}</dd></div>`).join("")}</dl>`;
  }

  function story() {
    const { text, question } = item;
    const asked = text.endsWith(question) ? text.length - question.length : text.length;
    // facts may be told in any order
    const order = item.facts.map((fact, index) => [...fact, index]).sort((a, b) => a[0] - b[0]);
    let html = "";
    let at = 0;
    for (const [start, end, role, hop, index] of order) {
      if (start < at) continue;
      const about = hop ? `${role}, hop ${hop}` : role;
      html += escaped(text.slice(at, start));
      html += `<mark class="stroke ${grid.roleClass(role)}" data-fact="${index}" title="${escaped(about)}">${escaped(text.slice(start, end))}${hop ? `<sup>${hop}</sup>` : ""}</mark>`;
      at = end;
    }
    const from = Math.max(asked, at);
    html += `${escaped(text.slice(at, from))}<span class="asked">${escaped(text.slice(from))} <b class="answer">${escaped(item.answer)}</b></span>`;
    $("item-story").innerHTML = html;
  }

  // -- events --------------------------------------------------------------------------------------------------------

  /** Pick the question that the address names; false if it names none of the page's. */
  function follow() {
    const named = /^#item=(.+)$/.exec(location.hash);
    if (!named) return false;
    let id = named[1];
    try { id = decodeURIComponent(id); } catch { /* a % that stands for itself */ }
    const one = data.items.find((candidate) => candidate.id === id);
    $("items").scrollIntoView();
    if (one) pick(one.number, false);
    else said.textContent = `There is no question “${id}” on this page.`;
    return Boolean(one);
  }

  function listen() {
    find.addEventListener("input", search);
    for (const owner of [find, found]) owner.addEventListener("keydown", move);
    for (const select of Object.values(filters)) select?.addEventListener("change", search);
    let frame = 0;
    found.addEventListener("scroll", () => { frame ||= requestAnimationFrame(() => { frame = 0; list(); }); }, { passive: true });
    found.addEventListener("click", (event) => {
      const hit = event.target.closest(".hit");
      if (hit) pick(hits[Number(hit.dataset.at)], true);
    });
    $("item-head").addEventListener("click", (event) => {
      const rung = event.target.closest("[data-number]");
      if (!rung) return;
      pick(Number(rung.dataset.number), true);
      document.querySelector("#item-head [aria-pressed=true]").focus();
    });
    views?.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      patched = button.value === "patching";
      show();
    });
    ways?.addEventListener("change", show);
    window.addEventListener("hashchange", follow);
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("input, select, textarea")) return;
      event.preventDefault();
      find.focus();
    });
  }

  async function start() {
    await drawn;
    if (!("DecompressionStream" in window)) {
      box.insertAdjacentHTML("beforebegin", '<p class="warn">This browser is too old to unpack the questions: it lacks DecompressionStream.</p>');
      return;
    }
    data = await questions.unpack();
    questions.axisTitle = data.axisTitle;
    box.hidden = false;
    listen();
    search();
    if (!follow()) pick(hits[0], false);
    box.dataset.ready = "true";
  }
  start();
})();
