// Curves over the steps, drawn by uPlot.

const plots = new Set();

// A plot is drawn again when its place has another width: a smaller window, a scroll bar, or what was folded.
const placed = new ResizeObserver(() => requestAnimationFrame(() => {
  for (const one of plots) if (one.box.clientWidth && one.box.clientWidth !== one.width) one.draw();
}));

// Draw curves: `series` of {label, values, color, dash, fill, width}; values are null where there are none.
function plot(parent, { title, note = "", series, log = false, height = 190, bands = [], mark = () => null, leastSpan = LOOK.least_span, none }) {
  const box = element("div", { class: "plot" });
  box.append(element("h4", {}, title, " ", element("small", {}, note)));
  parent.append(box);
  const drawn = series.map((one) => (log ? one.values.map((value) => (value > 0 && Number.isFinite(value) ? value : null)) : one.values));
  const drawable = (values) => values.some((value) => value !== null && Number.isFinite(value));
  if (!(none === undefined ? drawn.some(drawable) : drawable(drawn[drawn.length - 1]))) {
    box.append(element("p", { class: "none" }, none ?? "There is nothing finite above 0 to draw."));
    return;
  }
  const range = log ? null : rangeOf(series.filter((about) => !about.silent).map((about) => about.values), leastSpan);
  const one = { box, uplot: null, width: 0 };
  one.draw = () => {
    one.uplot?.destroy();
    one.width = box.clientWidth;
    const axis = { stroke: css("faint"), grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line"), width: 1 }, font: "11px system-ui, sans-serif" };
    one.uplot = new uPlot({
      width: Math.max(160, one.width), height, ms: 1,
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "steps" } },
      scales: { x: { time: false, min: columns[state.from][0], max: columns[state.to][0], auto: false }, y: log ? { distr: 3 } : { range: () => range } },
      axes: [{ ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] },
        { ...axis, size: (_, labels) => Math.max(62, 18 + 6.6 * Math.max(0, ...(labels ?? []).map((label) => label.length))),
          ...(log ? { grid: { ...axis.grid, filter: fewOfMany }, ticks: { ...axis.ticks, filter: fewOfMany }, filter: fewOfMany } : {}),
          values: (_, ticks, __, ___, apart) => ticks.map((tick) => tickText(tick, log ? 0 : apart)) }],
      series: [{ label: "step" }, ...series.map((about) => ({
        label: about.label, class: about.silent ? "silent" : undefined, stroke: about.color ? css(about.color) : "transparent", width: about.width ?? 1.6,
        dash: about.dash, fill: about.fill ? css("band") : undefined, fillTo: about.fill && log ? (u) => u.scales.y.min : undefined,
        value: (_, value) => digits(value, 7), points: { show: drawn[0].length < 40 && !about.fill && !about.silent, size: 4 }, spanGaps: false,
      }))],
      bands: bands.map((band) => ({ ...band, fill: css("band") })),
      hooks: { draw: [(u) => verticalMark(u, mark())], setScale: [zoomed] },
      legend: { live: true },
    }, [columns.map(([first]) => first), ...drawn], box);
  };
  one.draw();
  plots.add(one);
  placed.observe(box);
}

// Whoever drags over some steps of a plot sees these in all plots and in the heat map; a double click shows all again.
let zooming = false;
function zoomed(u, key) {
  if (key !== "x" || zooming) return;
  const { min, max } = u.scales.x;
  if (min === null || max === null || !u.select.width && min === columns[state.from][0] && max === columns[state.to][0]) return;
  requestAnimationFrame(() => {
    const near = (step) => columns.reduce((best, [first], at) => (Math.abs(first - step) < Math.abs(columns[best][0] - step) ? at : best), 0);
    showColumns(near(min), Math.max(near(min) + (numColumns > 1 ? 1 : 0), near(max)));
  });
}

function zoomPlots() {
  zooming = true;
  for (const one of plots) one.uplot?.setScale("x", { min: columns[state.from][0], max: columns[state.to][0] });
  zooming = false;
}

// Of a logarithmic axis the powers of ten, and of many of those every second, third, ...; where there are not two of
// them, 2 and 5 as well, and then all.
function fewOfMany(_, ticks) {
  const powers = ticks.filter((tick) => leads(tick, 1)), every = Math.ceil(powers.length / 7);
  if (powers.length > 1) return ticks.map((tick) => (leads(tick, 1) && Math.round(Math.log10(tick)) % every === 0 ? tick : null));
  const some = ticks.filter((tick) => leads(tick, 1, 2, 5));
  return some.length > 1 ? ticks.map((tick) => (some.includes(tick) ? tick : null)) : ticks;
}

// Whether a number is one of these times a power of ten.
function leads(value, ...firsts) {
  return value > 0 && firsts.some((first) => Math.abs(Math.log10(value / first) - Math.round(Math.log10(value / first))) < 1e-9);
}

// A number of an axis, with the digits that tell it from its neighbor.
function tickText(tick, apart) {
  if (tick === null) return "";
  const places = apart > 0 && tick !== 0 ? Math.floor(Math.log10(Math.abs(tick) * 1.000001)) - Math.floor(Math.log10(apart * 1.000001)) + 2 : 0;
  return digits(tick, Math.max(4, Math.min(15, places)));
}

// From the lowest to the highest of the values in some lists, with a margin; the band may reach beyond.
function rangeOf(lists, leastSpan) {
  let low = Infinity, high = -Infinity;
  for (const values of lists) {
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  const magnitude = Math.max(Math.abs(low), Math.abs(high));
  if (!(magnitude > 0 && magnitude < Infinity)) return [0, 1];
  const least = leastSpan * magnitude, margin = Math.max(0, (least - (high - low)) / 2) + 0.12 * Math.max(high - low, least);
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

function verticalMark(u, step) {
  if (step === null) return;
  const x = Math.round(u.valToPos(step, "x", true));
  u.ctx.save();
  u.ctx.strokeStyle = css("strong");
  u.ctx.globalAlpha = 0.6;
  u.ctx.setLineDash([4, 4]);
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.restore();
}

function forget(parent) {
  for (const one of plots) if (parent.contains(one.box)) { one.uplot?.destroy(); placed.unobserve(one.box); plots.delete(one); }
  parent.replaceChildren();
}

function redrawPlots() {
  for (const one of plots) one.draw();
}

function drawHeadCurves() {
  const parent = document.getElementById("curves"), more = document.getElementById("more-curves");
  if (!parent) return;
  const last = page.curves.length - 1;
  drawCurves(parent, page.curves.filter((_, at) => at === 0 || at === last));
  more?.addEventListener("toggle", () => {
    if (more.open && !more.lastElementChild.childElementCount) drawCurves(more.lastElementChild, page.curves.slice(1, last));
  });
}

// The sizes of the tensors of each phase, for a run by itself.
function drawPhases() {
  const parent = document.getElementById("of-phases");
  if (!parent) return;
  for (const phase of ["forward", "backward", "grad", "update"]) {
    const own = rows.phase.map((one, row) => row).filter((row) => rows.phase[row] === phase && !rows.stage[row] && !single(row));
    if (!own.length) continue;
    const sorted = columns.map((_, column) => own.map((row) => sizeAt("size", row, column)).filter((size) => size > 0 && Number.isFinite(size)).sort((a, b) => a - b));
    const of = (place) => sorted.map((sizes) => (sizes.length ? sizes[place(sizes.length)] : null));
    plot(parent, { title: phase, note: `${own.length} sites`, log: true, height: 130, series: [
      { label: "largest", values: of((count) => count - 1), color: "candidate" },
      { label: "median", values: of((count) => count >> 1), color: "baseline", width: 2.4 },
      { label: "smallest", values: of(() => 0), color: "floor" }] });
  }
}

function drawCurves(parent, curves) {
  for (const curve of curves) {
    if (!comparing) {
      plot(parent, { title: curve.title, series: [{ label: "value", values: curve.size, color: "baseline" }] });
      continue;
    }
    const bound = (sign) => curve.baseline.map((value, at) => (value === null || curve.floor[at] === null ? null : value + sign * Math.abs(value) * curve.floor[at]));
    plot(parent, {
      title: curve.title, note: "the band is what the floor allows", bands: [{ series: [2, 1] }],
      series: [
        { label: "floor, lower", values: bound(-1), silent: true, width: 0 }, { label: "upper", values: bound(1), silent: true, width: 0 },
        { label: "baseline", values: curve.baseline, color: "baseline", width: 2.4 },
        { label: "candidate", values: curve.candidate, color: "candidate", dash: [6, 3] },
      ],
    });
    plot(parent, {
      title: `difference: ${curve.title}`, note: "relative; the band is what the floor allows", log: true, none: noneText(curve.row),
      series: [
        { label: "floor", values: curve.floor, color: "floor", fill: true, width: 1, dash: [3, 3] },
        { label: "difference", values: curve.difference, color: "candidate" },
      ],
    });
  }
}
