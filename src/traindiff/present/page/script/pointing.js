// The mouse and the keyboard on the heat map.

const tip = document.getElementById("tip");

function cellAt(event) {
  const bounds = map.getBoundingClientRect();
  const x = event.clientX - bounds.left - layout.gutter, y = event.clientY - bounds.top - EDGE;
  const line = Math.floor(y / layout.rowHeight), lines = Math.ceil(state.visible.length / layout.pool);
  if (!layout.image || line < 0 || line >= lines || x > layout.width) return null;
  const column = state.from + Math.max(0, Math.min(span() - 1, Math.floor((x / layout.width) * span())));
  const best = largestUnder(x, line, column);
  return { row: rowAt(line, best), column: best };
}

// Where several columns share a pixel, the one whose value is drawn.
function largestUnder(x, line, column) {
  if (span() <= layout.width) return column;
  const values = heat(), to = Math.min(state.to + 1, state.from + Math.ceil(((x + 1) / layout.width) * span()));
  let best = column;
  for (let at = column; at < to; at++) {
    const row = rowAt(line, at), held = rowAt(line, best);
    if (values[row * numColumns + at] > values[held * numColumns + best]) best = at;
  }
  return best;
}

function cellText(row, column) {
  const where = `${siteText(row)}\n${phaseText(row)}, ${stepText(column)}`;
  if (!comparing) {
    const size = sizeAt("size", row, column);
    return `${where}\n${Number.isNaN(size) ? "not recorded" : `norm ${digits(size)}, largest |x| ${digits(sizeAt("largest", row, column))}`}`;
  }
  const difference = sizeAt("difference", row, column), floor = sizeAt("floor", row, column);
  if (Number.isNaN(difference)) return `${where}\nnot compared`;
  const word = wordAt(row, column), follows = word === "follows" ? "; it follows from the first divergence" : "";
  if (word === "identical") return `${where}\nthe same bits`;
  const size = difference === 0 ? "other bits, the same numbers" : difference === Infinity ? "differs, without a size" : `difference ${digits(difference)}`;
  if (floor === Infinity) return `${where}\n${size}${follows || ", not judged"}`;
  if (difference === Infinity || floor === 0) return `${where}\n${size}${floor ? `; its floor is ${digits(floor)}` : ", and must not differ"}${follows}`;
  return `${where}\ndifference ${digits(difference)} = ${digits(ratioAt(row, column))} x its floor of ${digits(floor)}${follows}`;
}

map.addEventListener("pointermove", (event) => {
  const cell = cellAt(event);
  tip.hidden = !cell;
  if (!cell) return;
  tip.textContent = cellText(cell.row, cell.column);
  const bounds = frame.getBoundingClientRect(), x = event.clientX - bounds.left, y = event.clientY - bounds.top + frame.scrollTop;
  tip.style.left = `${Math.min(x + 16, Math.max(4, frame.clientWidth - tip.offsetWidth - 6))}px`;
  const below = y + 18, room = frame.scrollTop + frame.clientHeight - tip.offsetHeight - 4;
  tip.style.top = `${below > room ? Math.max(frame.scrollTop, y - tip.offsetHeight - 12) : below}px`;
});
map.addEventListener("pointerleave", () => { tip.hidden = true; });
map.addEventListener("click", (event) => {
  const cell = cellAt(event);
  if (cell) select(cell.row, cell.column);
});

const KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
map.addEventListener("keydown", (event) => {
  const shown = state.visible.length;
  if (!shown) return;
  let at = state.visible.indexOf(state.row), column = state.column;
  if (event.key === "Home") column = state.from;
  else if (event.key === "End") column = state.to;
  else if (KEYS[event.key]) {
    at = Math.max(0, Math.min(shown - 1, Math.max(0, at) + KEYS[event.key][0]));
    column = Math.max(state.from, Math.min(state.to, column + KEYS[event.key][1]));
  } else return;
  event.preventDefault();
  select(state.visible[Math.max(0, at)], column);
  const box = boxOf(state.row, state.column);
  if (box && (box.y < frame.scrollTop || box.y > frame.scrollTop + frame.clientHeight - 50)) frame.scrollTop = box.y - 120;
});
