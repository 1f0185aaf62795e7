// The address of a cell: `#site=...&step=...` shows it again, on this page or on another machine's copy of it.

const names = new Map(); // rows by the name in an address
for (let row = numRows - 1; row >= 0; row--) names.set(nameOf(row), row);

function nameOf(row) {
  return `${phaseText(row)}: ${siteText(row)}`;
}

function addressOf(row, column) {
  return `#${new URLSearchParams({ site: nameOf(row), step: columns[column][0] })}`;
}

// The cell that the address names; null if it names none, or one that this page lacks.
function addressed() {
  const asked = new URLSearchParams(location.hash.slice(1)), row = names.get(asked.get("site"));
  if (row === undefined) return null;
  const step = Number(asked.get("step"));
  return { row, column: asked.has("step") && Number.isFinite(step) ? columnOf(step) : state.column };
}

function followAddress() {
  const cell = addressed();
  if (!cell || (cell.row === state.row && cell.column === state.column)) return;
  if (!state.visible.includes(cell.row)) showAll();
  select(cell.row, cell.column);
}

// A page in a frame of a notebook has no address of its own to change.
function noteAddress() {
  if (state.row === null || location.protocol === "about:" || location.protocol === "data:") return;
  history.replaceState(history.state, "", addressOf(state.row, state.column));
}

function linkTo(row, column) {
  const link = element("a", { class: "link", href: addressOf(row, column), title: "The address of this site and step" }, "link");
  const copy = element("button", { type: "button", class: "copy" }, "copy link");
  copy.addEventListener("click", async () => {
    const address = new URL(addressOf(row, column), location.href).href;
    copy.textContent = await navigator.clipboard?.writeText(address).then(() => "copied", () => null) ?? "use the link";
  });
  return element("p", { class: "address" }, link, " ", copy);
}
