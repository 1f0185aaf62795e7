// What is shown and selected, and who wants to know when that changes.

// Ends the listeners of this page when a newer one takes its place.
const life = new AbortController();

const page = JSON.parse(document.getElementById("data").textContent);
const rows = page.rows, columns = page.columns;
const numRows = rows.phase.length, numColumns = columns.length;
const comparing = page.kind === "comparison";
const cells = {};

const state = {
  row: null, column: 0, phases: new Set(rows.phase), quantity: comparing ? "ratio" : "relative", rank: "all",
  query: "", differing: false, oneStep: false, visible: [], from: 0, to: Math.max(0, numColumns - 1),
};

const onSelection = [], onFilter = [], onRange = [];

// Number of columns that are shown: all of them, or a range that was zoomed into.
function span() {
  return state.to - state.from + 1;
}

function showColumns(from, to) {
  const [low, high] = [Math.max(0, Math.min(from, to)), Math.min(numColumns - 1, Math.max(from, to))];
  if (low === state.from && high === state.to) return;
  [state.from, state.to] = [low, high];
  for (const tell of onRange) tell();
}

function select(row, column) {
  state.row = row;
  state.column = Math.max(0, Math.min(numColumns - 1, column));
  if (state.column < state.from || state.column > state.to) showColumns(0, numColumns - 1);
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

// The line of a row among the single elements, whose numbers are there with all their digits.
const singleLines = new Map(page.single?.rows.map((row, line) => [row, line]));

function sizeAt(name, row, column) {
  const line = singleLines.get(row), field = page.single?.names.indexOf(name) ?? -1;
  if (line === undefined || field < 0) return sizeOf(cells[name][row * numColumns + column]);
  return cells.single[(field * singleLines.size + line) * numColumns + column];
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
