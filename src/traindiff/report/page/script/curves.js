// Curves over the steps, drawn by uPlot.

const plots = new Set();

// Draw curves: `series` of {label, values, colour, dash, fill, width}; values are null where there are none.
function plot(parent, { title, note = "", series, log = false, height = 190, bands = [], mark = () => null, range, none }) {
  const box = element("div", { class: "plot" });
  box.append(element("h4", {}, title, " ", element("small", {}, note)));
  parent.append(box);
  const drawn = series.map((one) => (log ? one.values.map((value) => (value > 0 && Number.isFinite(value) ? value : null)) : one.values));
  const drawable = (values) => values.some((value) => value !== null && Number.isFinite(value));
  if (!(none === undefined ? drawn.some(drawable) : drawable(drawn[drawn.length - 1]))) {
    box.append(element("p", { class: "none" }, none ?? "There is nothing finite above 0 to draw."));
    return;
  }
  const one = { box, uplot: null };
  one.draw = () => {
    one.uplot?.destroy();
    const axis = { stroke: css("faint"), grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line"), width: 1 }, font: "11px system-ui, sans-serif" };
    one.uplot = new uPlot({
      width: Math.max(240, box.clientWidth), height, ms: 1,
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "steps" } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : range ? { range: () => range } : {} },
      axes: [{ ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] },
        { ...axis, size: 62, ...(log ? { grid: { ...axis.grid, filter: powersOnly }, ticks: { ...axis.ticks, filter: powersOnly }, filter: powersOnly } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : digits(tick))) }],
      series: [{ label: "step" }, ...series.map((about) => ({
        label: about.label, class: about.silent ? "silent" : undefined, stroke: about.colour ? css(about.colour) : "transparent", width: about.width ?? 1.6,
        dash: about.dash, fill: about.fill ? css("band") : undefined, fillTo: about.fill && log ? (u) => u.scales.y.min : undefined,
        value: (_, value) => digits(value), points: { show: drawn[0].length < 40 && !about.fill && !about.silent, size: 4 }, spanGaps: false,
      }))],
      bands: bands.map((band) => ({ ...band, fill: css("band") })),
      hooks: { draw: [(u) => verticalMark(u, mark())] },
      legend: { live: true },
    }, [columns.map(([first]) => first), ...drawn], box);
  };
  one.draw();
  plots.add(one);
}

// Of a logarithmic axis the powers of ten, and of many of those every second, third, ...
function powersOnly(_, ticks) {
  const powers = ticks.filter(isPower), every = Math.ceil(powers.length / 7);
  return ticks.map((tick) => (isPower(tick) && Math.round(Math.log10(tick)) % every === 0 ? tick : null));
}

function isPower(value) {
  return value > 0 && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
}

// From the lowest to the highest of some values, with a margin; the band may reach beyond.
function rangeOf(...lists) {
  const finite = lists.flat().filter((value) => value !== null && Number.isFinite(value));
  if (!finite.length) return undefined;
  const low = Math.min(...finite), high = Math.max(...finite), margin = 0.12 * (high - low) || 0.1 * Math.abs(high) || 1;
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
  for (const one of plots) if (parent.contains(one.box)) { one.uplot?.destroy(); plots.delete(one); }
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

function drawCurves(parent, curves) {
  for (const curve of curves) {
    if (!comparing) {
      plot(parent, { title: curve.title, series: [{ label: "value", values: curve.size, colour: "baseline" }] });
      continue;
    }
    const bound = (sign) => curve.baseline.map((value, at) => (value === null || curve.floor[at] === null ? null : value + sign * Math.abs(value) * curve.floor[at]));
    plot(parent, {
      title: curve.title, note: "the band is what the floor allows", bands: [{ series: [2, 1] }],
      range: rangeOf(curve.baseline, curve.candidate),
      series: [
        { label: "floor, lower", values: bound(-1), silent: true, width: 0 }, { label: "upper", values: bound(1), silent: true, width: 0 },
        { label: "baseline", values: curve.baseline, colour: "baseline", width: 2.4 },
        { label: "candidate", values: curve.candidate, colour: "candidate", dash: [6, 3] },
      ],
    });
    plot(parent, {
      title: `difference: ${curve.title}`, note: "relative; the band is what the floor allows", log: true, none: noneText(curve.row),
      series: [
        { label: "floor", values: curve.floor, colour: "floor", fill: true, width: 1, dash: [3, 3] },
        { label: "difference", values: curve.difference, colour: "candidate" },
      ],
    });
  }
}
