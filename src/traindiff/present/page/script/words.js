// Numbers and sites as people read them.

function digits(value, places = 4) {
  if (value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(places > 4 ? places - 1 : 2).replace("e+", "e") : String(Number(value.toPrecision(places)));
}

function phaseText(row) {
  return rows.phase[row] + (rows.stage[row] ? ` (${rows.stage[row]})` : "");
}

function siteText(row) {
  const call = rows.call[row] ? ` call ${rows.call[row]}` : "";
  return `${rows.path[row]} ${rows.slot[row]}`.trimEnd() + call + (rows.micro[row] ? ` micro-step ${rows.micro[row]}` : "");
}

function stepText(column) {
  const [first, last] = columns[column];
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

function element(name, about = {}, ...content) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (key === "class") one.className = value;
    else if (key.startsWith("on")) one.addEventListener(key.slice(2), value);
    else one.setAttribute(key, value);
  }
  one.append(...content);
  return one;
}

function columnOf(step) {
  let column = 0;
  while (column + 1 < columns.length && columns[column + 1][0] <= step) column++;
  return column;
}
