// Numbers and sites as people read them.

function digits(value, places = 4) {
  if (value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return String(value); // counts, and scales of a loss, are exact
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

// Two numbers with as many digits as show that they differ, if they do.
function toldApart(one, other, places = 5) {
  for (let more = places; more < 17; more++) {
    const texts = [digits(one, more), digits(other, more)];
    if (texts[0] !== texts[1] || one === other || Number.isNaN(one) || Number.isNaN(other)) return texts;
  }
  return [String(one), String(other)];
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
