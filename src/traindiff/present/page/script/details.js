// The site that is selected: its curves, its numbers, its profiles, and what was found there.

const details = document.getElementById("details");
const LEAST_SPAN_OF_SIZES = 2e-2; // ten times what the codes of sizes tell apart (arrays.js)
const SIDE_COLORS = comparing ? ["baseline", "candidate"] : ["baseline"];

function showDetails() {
  forget(details);
  const row = state.row;
  if (row === null) return;
  const about = [phaseText(row), rows.dtype[row], rows.shape[row]].filter(Boolean).join(" · ");
  details.append(element("h3", { id: "details-title" }, siteText(row)), element("p", { class: "where" }, about));
  details.append(element("p", { class: "now" }, cellText(row, state.column).split("\n").slice(1).join(": ")), linkTo(row, state.column));
  page.findings.filter((finding) => finding.row === row).forEach((finding) => details.append(foundBox(finding)));
  const mark = () => columns[state.column][0], line = (name) => columns.map((_, column) => finiteOrNull(sizeAt(name, row, column)));
  if (comparing) {
    plot(details, { title: "Difference", note: "relative L2, and its floor", log: true, height: 150, mark, none: noneText(row), series: [
      { label: "floor", values: line("floor"), color: "floor", fill: true, width: 1, dash: [3, 3] },
      { label: "difference", values: line("difference"), color: "candidate" }] });
    plot(details, { title: "Size", note: single(row) ? "|value|" : "L2 norm", height: 150, mark, leastSpan: LEAST_SPAN_OF_SIZES, series: [
      { label: "baseline", values: line("baseline"), color: "baseline", width: 2.4 },
      { label: "candidate", values: line("candidate"), color: "candidate", dash: [6, 3] }] });
  } else {
    plot(details, { title: "Size", note: single(row) ? "|value|" : "L2 norm", log: true, height: 150, mark, series: [
      { label: "norm", values: line("size"), color: "baseline" }, { label: "largest |x|", values: line("largest"), color: "candidate" }] });
  }
  showNumbers(row);
  document.getElementById("status").textContent = cellText(row, state.column).replaceAll("\n", ", ");
}

// What stands in place of a curve of differences that has no point.
function noneText(row) {
  const sizes = columns.map((_, column) => sizeAt("difference", row, column));
  if (sizes.some((size) => size === Infinity)) return "It differs, without a size: what must be equal, whole numbers, shapes, or NaN.";
  return sizes.some((size) => size === 0) ? "0 throughout: the same bits." : "It was not compared.";
}

function finiteOrNull(value) {
  return Number.isFinite(value) ? value : null;
}

function single(row) {
  return rows.shape[row] === "scalar";
}

function foundBox(finding) {
  const list = element("dl");
  for (const [name, value] of Object.entries(finding.evidence)) {
    const text = typeof value === "number" ? String(Number(value.toPrecision(7))) : typeof value === "string" ? value : JSON.stringify(value);
    list.append(element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, text));
  }
  const where = `step ${finding.step}${finding.rank === null ? "" : `, rank ${finding.rank}`}: `;
  return element("div", { class: "found" }, element("strong", {}, where, term(finding.kind)), element("div", {}, finding.message), list);
}

// Numbers and profiles of the step in which the site is farthest from the baseline, or largest.
function showNumbers(row) {
  if (!page.numbers || !cells.numbers) return;
  const names = page.numbers.names, sides = page.sides.length;
  const of = (side) => Object.fromEntries(names.map((name, at) => [name, cells.numbers[(row * sides + side) * names.length + at]]));
  const held = page.sides.map((_, side) => of(side));
  if (held[0].count === 0) return;
  const what = comparing ? "where the difference is largest" : "where it is largest";
  const head = element("tr", {}, element("td"), ...page.sides.map((side) => element("th", { scope: "col", class: "number" }, side)));
  const lines = NUMBER_LINES.filter(([, value]) => held.some((one) => Number.isFinite(value(one)))).map(([name, value]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...numberTexts(held.map(value)).map((text) => element("td", { class: "number" }, text))));
  details.append(
    element("div", { class: "plot" },
      element("h4", {}, `Numbers, step ${rows.step[row]} `, element("small", {}, what)),
      element("table", { class: "small" }, element("thead", {}, head), element("tbody", {}, ...lines))));
  if (!single(row)) {
    details.append(sharesOf(held));
    showHistogram(row);
    showProfiles(row);
  }
}

function numberTexts(values) {
  const texts = values.length > 1 ? toldApart(...values) : values.map((value) => digits(value, 7));
  return values.map((value, at) => (Number.isInteger(value) && Math.abs(value) < 1e15 ? value.toLocaleString("en") : texts[at]));
}

const finiteCount = (one) => one.count - one.nan - one.positive_infinity - one.negative_infinity;
const NUMBER_LINES = [
  ["elements", (one) => one.count], ["mean", (one) => one.sum / finiteCount(one)],
  ["standard deviation", (one) => Math.sqrt(Math.max(0, one.sum_of_squares / finiteCount(one) - (one.sum / finiteCount(one)) ** 2))],
  ["minimum", (one) => one.minimum], ["maximum", (one) => one.maximum], ["smallest |x| above 0", (one) => one.smallest],
  ["zeros", (one) => one.zero], ["subnormal", (one) => one.subnormal], ["NaN", (one) => one.nan],
  ["infinite", (one) => one.positive_infinity + one.negative_infinity],
];

// What the elements are: negative, zero, positive, not finite.
function sharesOf(held) {
  const parts = (one) => {
    const bad = one.count - finiteCount(one), positive = one.count - one.negative - one.zero - bad;
    return [["negative", one.negative, css("baseline")], ["zero", one.zero, css("floor")],
      ["positive", positive, css("candidate")], ["not finite", bad, css("bad")]];
  };
  const bars = held.flatMap((one, side) => [
    element("span", {}, page.sides[side]),
    element("div", { class: "share", role: "img", "aria-label": parts(one).map(([name, count]) => `${name} ${shareText(count, one.count)}`).join(", ") },
      ...parts(one).filter(([, count]) => count > 0).map(([name, count, color]) => {
        const bar = element("div", { title: `${name}: ${shareText(count, one.count)}` });
        bar.style.cssText = `width: ${(100 * count) / one.count}%; background: ${color}`;
        return bar;
      }))]);
  const legend = parts(held[0]).map(([name, , color]) => {
    const mark = element("span", { class: "key" });
    mark.style.background = color;
    mark.style.marginLeft = "12px";
    return element("span", {}, mark, name);
  });
  return element("div", { class: "plot" }, element("h4", {}, "Signs of the elements ", element("small", {}, ...legend)),
    element("div", { class: "shares" }, ...bars));
}

function shareText(count, total) {
  return `${digits((100 * count) / total)} %`;
}

function showProfiles(row) {
  const names = page.profiles.names, sides = page.sides.length, buckets = cells.profiles.length / (numRows * sides * names.length);
  for (const [title, field] of [["Rows", "row_squares"], ["Columns", "column_squares"]]) {
    const at = names.indexOf(field);
    const values = page.sides.map((_, side) => {
      const from = ((row * sides + side) * names.length + at) * buckets;
      return Array.from(cells.profiles.subarray(from, from + buckets), (one) => Math.sqrt(one));
    });
    if (values.flat().every((one) => !(one > 0))) continue;
    details.append(element("div", { class: "plot" },
      element("h4", {}, `${title} `, element("small", {}, `L2 norm of each of ${buckets} groups of them`)), barsOf(values)));
  }
}

function showHistogram(row) {
  const held = page.histograms[row];
  if (!held) return;
  const last = held.first + held.counts[0].length - 1;
  details.append(element("div", { class: "plot" },
    element("h4", {}, "Histogram ", element("small", {}, `of |x|, one bar for each power of two, from 2^${held.first} to 2^${last}`)), barsOf(held.counts)));
}

function barsOf(values) {
  const space = "http://www.w3.org/2000/svg", width = 400, height = 74, count = values[0].length;
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", values.map((one, side) => `${page.sides[side]}: ${Array.from(one, (value) => digits(value)).join(", ")}`).join("; "));
  svg.style.width = "100%";
  const largest = Math.max(...values.flat().filter(Number.isFinite)) || 1;
  const slot = width / count, gap = Math.min(4, slot / 4), bar = (slot - gap) / values.length;
  values.forEach((one, side) => one.forEach((value, at) => {
    const rect = document.createElementNS(space, "rect");
    const tall = Math.max(0, (Math.min(value, largest) / largest) * (height - 6)) || 0;
    for (const [name, number] of Object.entries({ x: at * slot + gap / 2 + side * bar, y: height - 2 - tall, width: Math.max(0.5, bar - 1), height: tall })) rect.setAttribute(name, number);
    rect.setAttribute("fill", css(SIDE_COLORS[side]));
    svg.append(rect);
  }));
  return svg;
}
