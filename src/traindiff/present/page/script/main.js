// Bring it all together.

function controls() {
  const phases = document.getElementById("phases");
  for (const phase of new Set(rows.phase)) {
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "true" }, phase);
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", String(on));
      if (on) state.phases.add(phase); else state.phases.delete(phase);
      filter();
    });
    phases.append(chip);
  }
  const quantity = document.getElementById("quantity");
  for (const name of comparing ? ["ratio", "difference"] : ["relative", "size", "largest", "zero", "nonfinite"]) {
    quantity.append(element("option", { value: name }, LOOK.quantities[name].name));
  }
  quantity.addEventListener("change", () => { state.quantity = quantity.value; paint(); });
  if (page.by_rank) {
    const rank = document.getElementById("rank");
    document.getElementById("rank-label").hidden = false;
    rank.append(element("option", { value: "all" }, "all together"));
    for (const one of [...new Set(page.by_rank.ranks)].sort((a, b) => a - b)) rank.append(element("option", { value: one }, one));
    rank.addEventListener("change", () => {
      state.rank = rank.value;
      quantity.disabled = state.rank !== "all";
      filter();
    });
  }
  rangeControls();
  const query = document.getElementById("query");
  query.addEventListener("input", () => { state.query = query.value; filter(); });
  const differing = document.getElementById("differing");
  differing?.addEventListener("change", () => { state.differing = differing.checked; filter(); });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("one-step").addEventListener("change", (event) => { state.oneStep = event.target.checked; showTable(); });
  document.getElementById("more").addEventListener("click", () => { sorting.shown += 5 * MORE; showTable(); });
}

// The steps that all pictures show: typed here, or dragged over in a plot.
function rangeControls() {
  const ends = [document.getElementById("from-step"), document.getElementById("to-step")];
  if (!numColumns) return;
  for (const end of ends) {
    [end.min, end.max] = [columns[0][0], columns.at(-1)[1]];
    end.addEventListener("change", () => {
      if (ends.every((one) => one.value !== "")) showColumns(...ends.map((one) => columnOf(Number(one.value))));
      showRange();
    });
  }
  document.getElementById("all-steps").addEventListener("click", () => showColumns(0, numColumns - 1));
  showRange();
}

function showRange() {
  document.getElementById("from-step").value = columns[state.from][0];
  document.getElementById("to-step").value = columns[state.to][1];
  document.getElementById("all-steps").hidden = span() === numColumns;
}

// Every button that names a site shows it.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-row]");
  if (!button) return;
  const row = Number(button.dataset.row);
  if (!state.visible.includes(row)) showAll();
  select(row, columnOf(Number(button.dataset.step)));
  document.getElementById("map-title").scrollIntoView({ block: "start", behavior: "smooth" });
  const box = boxOf(row, state.column);
  if (box) frame.scrollTop = Math.max(0, box.y - 200);
}, { signal: life.signal });

function showAll() {
  state.phases = new Set(rows.phase);
  state.query = document.getElementById("query").value = "";
  state.rank = "all";
  state.differing = false;
  const differing = document.getElementById("differing");
  if (differing) differing.checked = false;
  document.getElementById("rank").value = "all";
  document.getElementById("quantity").disabled = false;
  for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", "true");
  filter();
}

function retint() {
  paint();
  redrawPlots();
  if (state.row !== null) showDetails();
}

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  retint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retint, { signal: life.signal });

// A page of `traindiff view` asks whether its recording has grown. Then it takes the place of its own content, and
// keeps what is selected, chosen and scrolled to.
function refreshFrom(address) {
  let busy = false;
  const timer = setInterval(async () => {
    if (busy) return;
    busy = true;
    const answer = await fetch(address).catch(() => null);
    const now = answer?.ok ? await answer.text() : document.body.dataset.known;
    if (now !== document.body.dataset.known && await renew()) clearInterval(timer);
    busy = false;
  }, 2000);
}

async function renew() {
  const answer = await fetch(location.pathname + location.search).catch(() => null);
  if (!answer?.ok) return false; // it is still being written: the next time
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!fresh.getElementById("data")) return false;
  document.body.dataset.kept = JSON.stringify({ ...choices(), scroll: window.scrollY });
  for (const name of ["refresh", "known"]) document.body.dataset[name] = fresh.body.dataset[name];
  life.abort();
  document.title = fresh.title;
  document.querySelector("main").style.minHeight = `${document.querySelector("main").offsetHeight}px`;
  fresh.querySelector("main").style.minHeight = document.querySelector("main").style.minHeight;
  delete document.body.dataset.ready;
  for (const part of ["header.top", "main", "footer", "#data", "#term-tip"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
  const script = document.getElementById("script"), again = document.createElement("script");
  again.id = "script";
  again.textContent = script.textContent;
  script.replaceWith(again);
  return true;
}

// What the reader has chosen, by names that a newer page has too.
function choices() {
  return {
    site: state.row === null ? null : nameOf(state.row), step: columns[state.column]?.[0], follows: state.column === numColumns - 1,
    off: [...new Set(rows.phase)].filter((phase) => !state.phases.has(phase)), query: state.query, quantity: state.quantity,
    rank: state.rank, differing: state.differing, oneStep: state.oneStep, by: sorting.by, down: sorting.down, shown: sorting.shown,
    range: state.from > 0 || state.to < numColumns - 1 ? [columns[state.from][0], columns[state.to][0]] : null,
    frame: frame.scrollTop, open: [...document.querySelectorAll("main details")].map((one) => one.open),
    theme: document.documentElement.dataset.theme ?? null,
  };
}

const kept = document.body.dataset.kept ? JSON.parse(document.body.dataset.kept) : null;
delete document.body.dataset.kept;

function restore() {
  const by = (id) => document.getElementById(id);
  for (const chip of document.querySelectorAll(".chip")) if (kept.off.includes(chip.textContent)) chip.setAttribute("aria-pressed", "false");
  state.phases = new Set(rows.phase.filter((phase) => !kept.off.includes(phase)));
  by("query").value = state.query = kept.query;
  by("quantity").value = state.quantity = kept.quantity;
  if (kept.rank === "all" || page.by_rank?.ranks.some((one) => String(one) === kept.rank)) {
    by("rank").value = state.rank = kept.rank;
    by("quantity").disabled = state.rank !== "all";
  }
  if (by("differing")) by("differing").checked = state.differing = kept.differing;
  by("one-step").checked = state.oneStep = kept.oneStep;
  [sorting.by, sorting.down, sorting.shown] = [kept.by, kept.down, kept.shown];
  if (kept.range) [state.from, state.to] = kept.range.map(columnOf);
  document.querySelectorAll("main details").forEach((one, at) => { if (kept.open[at] !== undefined) one.open = kept.open[at]; });
}

async function start() {
  for (const [name, block] of Object.entries(page.cells)) cells[name] = await unpacked(block);
  if (page.by_rank) cells.byRank = await unpacked(page.by_rank.ratio);
  if (page.single) cells.single = await unpacked(page.single.values);
  if (page.words) cells.words = await unpacked(page.words.values);
  if (page.numbers) cells.numbers = await unpacked(page.numbers.values);
  if (page.profiles) cells.profiles = await unpacked(page.profiles.values);
  controls();
  if (kept) restore();
  onFilter.push(paint, () => { if (!kept || document.body.dataset.ready) sorting.shown = MORE; showTable(); });
  onSelection.push(overlay, showDetails, () => (state.oneStep ? showTable() : markSelected()));
  if (!kept && addressed()) { state.row = addressed().row; state.column = addressed().column; }
  onRange.push(paint, zoomPlots, showRange);
  drawHeadCurves();
  drawPhases();
  if (numRows && numColumns) {
    farthest = extremes();
    farthestRatio = farthest.ratio;
    filter();
    const first = document.querySelector(".headline button.site"), before = kept && names.get(kept.site);
    if (before !== null && before !== undefined) select(before, kept.follows ? numColumns - 1 : columnOf(kept.step));
    else if (state.row !== null) select(state.row, state.column);
    else if (first) select(Number(first.dataset.row), columnOf(Number(first.dataset.step)));
    else {
      let row = comparing || !page.curves.length ? 0 : page.curves[0].row;
      for (let at = 1; comparing && at < numRows; at++) if (farthest.ratio[at] > farthest.ratio[row]) row = at;
      select(row, farthest.column[row]);
    }
  }
  onSelection.push(noteAddress);
  window.addEventListener("hashchange", followAddress, { signal: life.signal });
  document.querySelector("main").style.minHeight = "";
  if (kept) { frame.scrollTop = kept.frame; window.scrollTo(0, kept.scroll); }
  if (document.body.dataset.refresh) refreshFrom(document.body.dataset.refresh);
  document.body.dataset.ready = "yes";
}

start();
