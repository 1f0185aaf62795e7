// The heat map: a row of pixels for each site that is shown, a column for each step.

const map = document.getElementById("map"), axis = document.getElementById("axis"), frame = document.getElementById("map-frame");
const layout = { gutter: 0, names: true, total: 0, width: 0, height: 0, rowHeight: 1, pool: 1, image: null, colors: null };
const MOST_ROWS = 6000, MAP_HEIGHT = 560;
const MARKS = 236; // pixels that the marks of equal, infinite and following take beside the scale
const EDGE = 6; // pixels above and below the rows, for the text beside the first and the last
const LABEL = 12, NAMES_FROM = 74, LEAST_NAME = 80; // pixels: the height of a line of text, and where names of sites stand

const heats = new Map();

// The quantity that is shown, as log10, of all rows and columns.
function heat() {
  const name = state.rank === "all" ? state.quantity : `rank ${state.rank}`;
  if (!heats.has(name)) heats.set(name, state.rank === "all" ? heatOf(state.quantity) : heatOfRank(state.rank));
  return heats.get(name);
}

function heatOf(quantity) {
  const found = new Float32Array(numRows * numColumns);
  if (quantity === "ratio") {
    const differences = cells.difference, floors = cells.floor;
    for (let at = 0; at < found.length; at++) {
      const difference = differences[at], floor = floors[at];
      if (difference === MISSING) found[at] = NaN;
      else if (wordOf(at) === "follows") found[at] = FOLLOWS;
      else if (difference === ZERO) found[at] = -Infinity;
      else if (floor === INFINITE) found[at] = NaN; // not judged
      else if (floor === ZERO || difference === INFINITE) found[at] = Infinity;
      else found[at] = LOG10[difference] - LOG10[floor];
    }
    return found;
  }
  const codes = cells[quantity === "relative" ? "size" : quantity];
  for (let at = 0; at < found.length; at++) found[at] = LOG10[codes[at]];
  if (quantity === "relative") {
    for (let row = 0; row < numRows; row++) {
      const own = found.subarray(row * numColumns, (row + 1) * numColumns);
      const finite = own.filter(Number.isFinite).sort();
      const median = finite.length ? finite[finite.length >> 1] : 0;
      for (let at = 0; at < own.length; at++) own[at] -= median;
    }
  }
  return found;
}

function heatOfRank(rank) {
  const found = new Float32Array(numRows * numColumns).fill(NaN), held = page.by_rank.columns;
  const to = held.map(([first]) => columnOf(first));
  for (const [row, line] of rankLines(rank)) {
    for (let column = 0; column < held.length; column++) {
      const value = LOG10[cells.byRank[line * held.length + column]], at = row * numColumns + to[column];
      if (!(found[at] >= value)) found[at] = value;
    }
  }
  return found;
}

// The row with the largest value among those that share a line of the map.
function rowAt(line, column) {
  const from = line * layout.pool, values = heat();
  let best = state.visible[Math.min(from, state.visible.length - 1)];
  for (let at = from; at < Math.min(from + layout.pool, state.visible.length); at++) {
    if (values[state.visible[at] * numColumns + column] > values[best * numColumns + column]) best = state.visible[at];
  }
  return best;
}

new ResizeObserver(() => requestAnimationFrame(() => { if (frame.clientWidth !== layout.total && layout.colors) paint(); })).observe(frame);

function paint() {
  const ratio = window.devicePixelRatio || 1;
  layout.pool = Math.ceil(state.visible.length / MOST_ROWS) || 1;
  const lines = Math.ceil(state.visible.length / layout.pool);
  layout.rowHeight = Math.max(1, Math.min(20, Math.floor(MAP_HEIGHT / Math.max(1, lines))));
  const total = layout.total = frame.clientWidth;
  layout.gutter = Math.min(300, Math.round(total * 0.34));
  layout.names = layout.gutter >= NAMES_FROM + LEAST_NAME;
  if (!layout.names) layout.gutter = NAMES_FROM + 4;
  layout.width = Math.max(60, total - layout.gutter);
  layout.height = Math.max(40, lines * layout.rowHeight);
  for (const [canvas, height] of [[map, layout.height + 2 * EDGE], [axis, 22]]) {
    canvas.width = total * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
  }
  Object.assign(map.dataset, { gutter: layout.gutter, top: EDGE, rowHeight: layout.rowHeight, rows: state.visible.length });
  layout.colors = palette(state.rank === "all" ? state.quantity : "ratio");
  layout.image = lines ? imageOf(lines) : null;
  overlay();
  paintAxis(ratio);
  paintScale(ratio);
}

// One pixel per line and column; where there are more columns than pixels, the largest of those that share one.
function imageOf(lines) {
  const values = heat(), wide = Math.min(span(), Math.floor(layout.width * (window.devicePixelRatio || 1)));
  const image = new ImageData(wide, lines), pixels = new Uint32Array(image.data.buffer);
  const strongest = new Float32Array(pixels.length);
  for (let at = 0; at < state.visible.length; at++) {
    const start = state.visible[at] * numColumns, line = Math.floor(at / layout.pool) * wide;
    for (let x = 0; x < wide; x++) {
      const from = state.from + Math.floor((x * span()) / wide), to = Math.max(from + 1, state.from + Math.floor(((x + 1) * span()) / wide));
      let largest = NaN;
      for (let column = from; column < to; column++) {
        const value = values[start + column];
        if (!(largest >= value) && !Number.isNaN(value)) largest = value;
      }
      if (Number.isNaN(largest)) continue;
      const color = colorOf(layout.colors, largest);
      if (pixels[line + x] && largest <= strongest[line + x]) continue;
      pixels[line + x] = color;
      strongest[line + x] = largest;
    }
  }
  const canvas = new OffscreenCanvas(wide, lines);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function overlay() {
  const ratio = window.devicePixelRatio || 1, context = map.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, map.width, map.height);
  if (!layout.image) {
    context.fillStyle = css("faint");
    context.font = "13px system-ui, sans-serif";
    context.fillText("No site matches.", 12, 24);
    return;
  }
  context.translate(0, EDGE);
  context.imageSmoothingEnabled = false;
  context.drawImage(layout.image, layout.gutter, 0, layout.width, layout.height);
  labels(context);
  const first = document.querySelector(".headline button.site");
  if (first) ring(context, Number(first.dataset.row), columnOf(Number(first.dataset.step)));
  if (state.row !== null) crosshair(context);
}

// Phases that follow each other on the map: from which line to before which.
function blocksOf(lines) {
  const blocks = [];
  for (let line = 0; line < lines; line++) {
    const phase = rows.phase[state.visible[line * layout.pool]];
    if (blocks.at(-1)?.phase === phase) blocks.at(-1).to = line + 1;
    else blocks.push({ phase, from: line, to: line + 1 });
  }
  return blocks;
}

function labels(context) {
  const lines = Math.ceil(state.visible.length / layout.pool), blocks = blocksOf(lines);
  context.textBaseline = "middle";
  blocks.forEach(({ from, to }, at) => {
    const top = from * layout.rowHeight, height = (to - from) * layout.rowHeight;
    context.fillStyle = css("line");
    if (at) context.fillRect(layout.gutter, top - 0.5, layout.width, 1);
    context.fillStyle = css(at % 2 ? "floor" : "faint");
    context.fillRect(0, top + (at && height > 2 ? 1 : 0), 3, Math.max(1, height - (at && height > 2 ? 1 : 0)));
  });
  const font = `${Math.min(12, Math.max(10.5, layout.rowHeight - 3))}px ${css("mono")}`;
  context.font = `bold ${font}`;
  context.fillStyle = css("text");
  const ofPhases = linesOfPhases(blocks);
  for (const line of ofPhases) context.fillText(rows.phase[state.visible[line * layout.pool]], 8, middleOf(line), NAMES_FROM - 12);
  if (!layout.names) return;
  context.font = font;
  context.fillStyle = css("faint");
  for (const line of namedLines(ofPhases, lines)) {
    const name = siteText(state.visible[line * layout.pool]);
    context.fillText(shortened(context, name, layout.gutter - NAMES_FROM - 16), NAMES_FROM, middleOf(line));
  }
}

function middleOf(line) {
  return (line + 0.5) * layout.rowHeight;
}

// The first line of a phase beside which there is room for text: within its rows, as far as these are high enough.
function firstFree({ from, to }, taken) {
  const top = from * layout.rowHeight, end = to * layout.rowHeight, slack = Math.max(1, (LABEL + layout.rowHeight - (end - top)) / 2);
  for (let line = from; line < to; line++) {
    const y = middleOf(line);
    if (y - LABEL / 2 < top - slack || y + LABEL / 2 > end + slack) continue;
    if (taken.every((other) => Math.abs(other - y) >= LABEL)) return line;
  }
  return null;
}

// A line for each phase at its own rows. Those with the fewest choose first, since the others can make room; a phase
// whose rows are all beside the text of others has none.
function linesOfPhases(blocks) {
  const taken = [], found = [];
  for (const block of [...blocks].sort((one, other) => one.to - one.from - (other.to - other.from))) {
    const line = firstFree(block, taken);
    if (line === null) continue;
    taken.push(middleOf(line));
    found.push(line);
  }
  return found.sort((one, other) => one - other);
}

// Lines whose sites are named: those of the phases, then as many as there is room for.
function namedLines(ofPhases, lines) {
  const found = [...ofPhases];
  let next = 0, before = -Infinity;
  for (let line = 0; line < lines; line++) {
    while (ofPhases[next] <= line) before = middleOf(ofPhases[next++]);
    const y = middleOf(line), after = next < ofPhases.length ? middleOf(ofPhases[next]) : Infinity;
    if (y - before < LABEL || after - y < LABEL) continue;
    before = y;
    found.push(line);
  }
  return found;
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let from = Math.max(1, text.length - Math.floor(width / context.measureText("m").width));
  const cut = text.indexOf(".", from + 1);
  return `…${text.slice(cut > 0 && cut < text.length - 8 ? cut : from + 1)}`;
}

function boxOf(row, column) {
  const line = Math.floor(state.visible.indexOf(row) / layout.pool);
  const wide = layout.width / span();
  return line < 0 || column < state.from || column > state.to ? null : { x: layout.gutter + (column - state.from) * wide, y: line * layout.rowHeight, width: wide, height: layout.rowHeight };
}

function ring(context, row, column) {
  const box = boxOf(row, column);
  if (!box) return;
  context.lineWidth = 4;
  context.strokeStyle = css("card");
  for (let pass = 0; pass < 2; pass++) {
    context.beginPath();
    context.arc(box.x + box.width / 2, box.y + box.height / 2, Math.max(8, Math.min(14, box.height)), 0, 7);
    context.stroke();
    context.lineWidth = 2;
    context.strokeStyle = css("text");
  }
}

function crosshair(context) {
  const box = boxOf(state.row, state.column);
  if (!box) return;
  context.fillStyle = css("strong");
  context.globalAlpha = 0.35;
  context.fillRect(layout.gutter, box.y + box.height / 2 - 0.5, layout.width, 1);
  context.fillRect(box.x + box.width / 2 - 0.5, 0, 1, layout.height);
  context.globalAlpha = 1;
  context.strokeStyle = css("strong");
  context.lineWidth = 2;
  const width = Math.max(6, box.width), height = Math.max(6, box.height);
  context.strokeRect(box.x + (box.width - width) / 2, box.y + (box.height - height) / 2, width, height);
}

function paintAxis(ratio) {
  const context = axis.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = css("faint");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillText("step", layout.gutter - 30, 11);
  const every = Math.ceil(span() / Math.max(1, Math.floor(layout.width / 46)));
  for (let column = state.from; column <= state.to; column += every) {
    const x = layout.gutter + ((column - state.from + 0.5) * layout.width) / span(), text = String(columns[column][0]);
    context.fillText(text, Math.max(layout.gutter, x - context.measureText(text).width / 2), 11);
  }
}

function paintScale(ratio) {
  const scale = document.getElementById("scale"), context = scale.getContext("2d"), total = scale.clientWidth;
  const narrow = total - layout.gutter < MARKS + 100, tall = narrow ? 70 : 46; // the marks then stand below the scale
  scale.width = total * ratio;
  scale.height = tall * ratio;
  scale.style.height = `${tall}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const { pixels, low, high } = layout.colors, about = LOOK.quantities[state.rank === "all" ? state.quantity : "ratio"];
  const left = layout.gutter, width = Math.max(80, Math.min(420, total - left - (narrow ? 16 : MARKS)));
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css("faint");
  context.textAlign = "right";
  context.fillText(about.unit || about.name.split(" ").slice(-1)[0], left - 8, 17);
  context.textAlign = "center";
  for (let x = 0; x < width; x++) {
    context.fillStyle = colorText(pixels[Math.round((x / (width - 1)) * (LEVELS - 1))]);
    context.fillRect(left + x, 6, 1, 14);
  }
  context.fillStyle = css("faint");
  const every = Math.ceil((high - low) / Math.max(2, Math.min(8, Math.floor(width / 36))));
  for (let power = low; power <= high; power += every) {
    const text = power === 0 ? "1" : power === 1 ? "10" : `1e${power}`;
    context.fillText(text, left + ((power - low) / (high - low)) * width, 32);
  }
  const marks = [[pixels[LEVELS], about.zero], [pixels[LEVELS + 1], "inf"]];
  if (comparing && state.rank === "all" && state.quantity === "ratio") marks.push([pixels[LEVELS + 2], "follows"]);
  marks.forEach(([color, text], at) => {
    const x = (narrow ? 4 : left + width + 20) + [0, 92, 146][at], y = narrow ? 46 : 6;
    context.fillStyle = colorText(color);
    context.fillRect(x, y, 16, 14);
    context.strokeStyle = css("line");
    context.strokeRect(x + 0.5, y + 0.5, 16, 14);
    context.fillStyle = css("faint");
    context.textAlign = "left";
    context.fillText(text, x + 21, y + 11);
  });
}
