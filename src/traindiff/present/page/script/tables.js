// The table of sites: those that the heat map shows, sorted and as many as wanted.

const table = document.getElementById("sites"), MORE = 100;
const sorting = { by: null, down: true, shown: MORE };

// The column in which a row is farthest, or largest.
function extremes() {
  const found = { column: new Int32Array(numRows), ratio: new Float64Array(numRows) };
  const values = heatOf(comparing ? "ratio" : "size");
  for (let row = 0; row < numRows; row++) {
    let best = -1;
    for (let column = 0; column < numColumns; column++) {
      const value = values[row * numColumns + column];
      if (!Number.isNaN(value) && (best < 0 || value > values[row * numColumns + best])) best = column;
    }
    found.column[row] = Math.max(0, best);
    found.ratio[row] = best < 0 ? NaN : comparing ? ratioAt(row, best) : sizeAt("size", row, best);
  }
  return found;
}

let farthest = null;

// The column whose numbers a row of the table has: where it is farthest, or that of the selected step.
function shownColumn(row) {
  return state.oneStep ? state.column : farthest.column[row];
}

function shownStep(row) {
  if (!state.oneStep) return rows.step[row];
  return columns[state.column][0];
}

function shownRatio(row) {
  return comparing ? ratioAt(row, shownColumn(row)) : NaN;
}

function isThere(row) {
  return !Number.isNaN(sizeAt(comparing ? "difference" : "size", row, shownColumn(row)));
}

function bothSizes(row) {
  const [one, other] = ["baseline", "candidate"].map((name) => sizeAt(name, row, shownColumn(row)));
  return single(row) ? toldApart(one, other) : [digits(one), digits(other)];
}

const firstFound = comparing ? page.findings[0] ?? null : null;

const TABLE_COLUMNS = comparing ? [
  ["phase", null, (row) => phaseText(row)], ["site", null, (row) => siteText(row)], ["tensor", null, (row) => `${rows.dtype[row]} ${rows.shape[row]}`],
  ["at step", (row) => shownStep(row), (row) => String(shownStep(row))],
  ["baseline", (row) => sizeAt("baseline", row, shownColumn(row)), (row) => bothSizes(row)[0]],
  ["candidate", (row) => sizeAt("candidate", row, shownColumn(row)), (row) => bothSizes(row)[1]],
  ["difference", (row) => sizeAt("difference", row, shownColumn(row)), null], ["floor", (row) => sizeAt("floor", row, shownColumn(row)), null],
  ["x floor", (row) => shownRatio(row), null], ["word", null, (row) => wordAt(row, shownColumn(row))],
] : [
  ["phase", null, (row) => phaseText(row)], ["site", null, (row) => siteText(row)], ["tensor", null, (row) => `${rows.dtype[row]} ${rows.shape[row]}`],
  ["at step", (row) => shownStep(row), (row) => String(shownStep(row))],
  ["norm", (row) => sizeAt("size", row, shownColumn(row)), null], ["largest |x|", (row) => sizeAt("largest", row, shownColumn(row)), null],
  ["zeros", (row) => sizeAt("zero", row, shownColumn(row)), null], ["not finite", (row) => sizeAt("nonfinite", row, shownColumn(row)), null],
];

// Terms of the glossary behind the heads of columns.
const TERM_OF = {
  phase: "phase", site: "site", baseline: "baseline", candidate: "candidate", difference: "relative L2 difference", floor: "noise floor",
  "x floor": "ratio", word: "above", "at step": "step",
};

function showTable() {
  const head = element("tr");
  TABLE_COLUMNS.forEach(([name, number], at) => {
    const cell = element("th", { scope: "col", class: number ? "number" : "" });
    if (sorting.by === at) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    const arrow = sorting.by === at ? (sorting.down ? " ▾" : " ▴") : "";
    const about = TERM_OF[name] ? { "data-term": TERM_OF[name], "aria-describedby": "term-tip" } : {};
    cell.append(element("button", { type: "button", onclick: () => sortBy(at), ...about }, name + arrow));
    head.append(cell);
  });
  table.tHead.replaceChildren(head);
  const ordered = sorted();
  table.tBodies[0].replaceChildren(...ordered.slice(0, sorting.shown).map(tableRow));
  const more = document.getElementById("more");
  more.hidden = ordered.length <= sorting.shown;
  document.getElementById("sites-count").textContent = ordered.length === numRows ? numRows : `${ordered.length} of ${numRows}`;
}

function sorted() {
  const there = state.oneStep ? state.visible.filter(isThere) : state.visible;
  if (sorting.by === null) return there;
  const [, number, text] = TABLE_COLUMNS[sorting.by], value = number ?? text, sign = sorting.down ? -1 : 1;
  const keys = new Map(there.map((row) => [row, value(row)]));
  return [...there].sort((one, other) => {
    const [a, b] = [keys.get(one), keys.get(other)];
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return a < b ? -sign : a > b ? sign : one - other;
  });
}

function sortBy(at) {
  sorting.down = sorting.by === at ? !sorting.down : Boolean(TABLE_COLUMNS[at][1]);
  sorting.by = at;
  showTable();
  table.tHead.rows[0].cells[at].firstChild.focus();
}

function tableRow(row) {
  const line = element("tr", { "aria-selected": String(row === state.row), "data-row": row });
  TABLE_COLUMNS.forEach(([name, number, text]) => {
    const cell = element("td", { class: number ? "number" : "" });
    if (name === "site") {
      cell.append(element("button", { type: "button", class: "site", "data-row": row, "data-step": shownStep(row) }, text(row)));
      if (firstFound && firstFound.row === row && firstFound.step === shownStep(row)) cell.classList.add("first");
    } else cell.append(text ? text(row) : name === "floor" && number(row) === Infinity ? "–" : digits(number(row)));
    if (name === "x floor" || name === "word") cell.classList.add(...["above", "follows"].filter((one) => one === wordAt(row, shownColumn(row))));
    line.append(cell);
  });
  return line;
}

function markSelected() {
  for (const line of table.tBodies[0].rows) line.setAttribute("aria-selected", String(Number(line.dataset.row) === state.row));
}
