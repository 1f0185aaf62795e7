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
  const query = document.getElementById("query");
  query.addEventListener("input", () => { state.query = query.value; filter(); });
  const differing = document.getElementById("differing");
  differing?.addEventListener("change", () => { state.differing = differing.checked; filter(); });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("one-step").addEventListener("change", (event) => { state.oneStep = event.target.checked; showTable(); });
  document.getElementById("more").addEventListener("click", () => { sorting.shown += 5 * MORE; showTable(); });
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
});

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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retint);

// A page of `traindiff view` asks whether its recording has grown, and then loads itself again.
function refreshFrom(address) {
  let known = null;
  setInterval(async () => {
    const answer = await fetch(address).catch(() => null);
    if (!answer?.ok) return;
    const now = await answer.text();
    if (known !== null && now !== known) location.reload();
    known = now;
  }, 2000);
}

async function start() {
  for (const [name, block] of Object.entries(page.cells)) cells[name] = await unpacked(block);
  if (page.by_rank) cells.byRank = await unpacked(page.by_rank.ratio);
  if (page.words) cells.words = await unpacked(page.words.values);
  if (page.numbers) cells.numbers = await unpacked(page.numbers.values);
  if (page.profiles) cells.profiles = await unpacked(page.profiles.values);
  controls();
  onFilter.push(paint, () => { sorting.shown = MORE; showTable(); });
  onSelection.push(overlay, showDetails, () => (state.oneStep ? showTable() : markSelected()));
  drawHeadCurves();
  if (numRows && numColumns) {
    farthest = extremes();
    farthestRatio = farthest.ratio;
    filter();
    const first = document.querySelector(".headline button.site");
    if (first) select(Number(first.dataset.row), columnOf(Number(first.dataset.step)));
    else {
      let row = comparing || !page.curves.length ? 0 : page.curves[0].row;
      for (let at = 1; comparing && at < numRows; at++) if (farthest.ratio[at] > farthest.ratio[row]) row = at;
      select(row, farthest.column[row]);
    }
  }
  if (document.body.dataset.refresh) refreshFrom(document.body.dataset.refresh);
  document.body.dataset.ready = "yes";
}

start();
