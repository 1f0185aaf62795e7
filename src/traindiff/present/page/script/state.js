// What is shown and selected, and who wants to know when that changes.

const page = JSON.parse(document.getElementById("data").textContent);
const rows = page.rows, columns = page.columns;
const numRows = rows.phase.length, numColumns = columns.length;
const comparing = page.kind === "comparison";
const cells = {};

const state = {
  row: null, column: 0, phases: new Set(rows.phase), quantity: comparing ? "ratio" : "relative", rank: "all",
  query: "", differing: false, oneStep: false, visible: [],
};

const onSelection = [], onFilter = [], onTheme = [];

function select(row, column) {
  state.row = row;
  state.column = Math.max(0, Math.min(numColumns - 1, column));
  for (const tell of onSelection) tell();
}

function filter() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  state.visible = [];
  for (let row = 0; row < numRows; row++) {
    if (!state.phases.has(rows.phase[row])) continue;
    if (state.differing && !(farthestRatio[row] > 1)) continue;
    if (state.rank !== "all" && !rankLines(state.rank).has(row)) continue;
    const name = `${phaseText(row)} ${siteText(row)}`.toLowerCase();
    if (words.every((word) => name.includes(word))) state.visible.push(row);
  }
  for (const tell of onFilter) tell();
}

// Lines of the ranks' array by row, for one rank.
const linesOfRank = new Map();
function rankLines(rank) {
  if (!linesOfRank.has(rank)) {
    const found = new Map();
    page.by_rank.ranks.forEach((one, line) => { if (String(one) === rank) found.set(page.by_rank.rows[line], line); });
    linesOfRank.set(rank, found);
  }
  return linesOfRank.get(rank);
}

let farthestRatio = null;

function sizeAt(name, row, column) {
  return sizeOf(cells[name][row * numColumns + column]);
}

// The word of a cell, by its place in the array of cells; empty where it was not compared.
function wordOf(at) {
  return cells.words?.[at] ? page.words.names[cells.words[at] - 1] : "";
}

function wordAt(row, column) {
  return wordOf(row * numColumns + column);
}

function ratioAt(row, column) {
  const difference = sizeAt("difference", row, column), floor = sizeAt("floor", row, column);
  if (difference === 0) return 0;
  if (Number.isNaN(difference) || floor === Infinity) return NaN;
  return floor ? difference / floor : Infinity;
}
