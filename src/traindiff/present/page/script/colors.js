// Colors of the heat map, of look.json: cool up to the floor, hot above it; those of lines come from the style sheet.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function rangeOfHeat() {
  let low = Infinity, high = -Infinity;
  for (const value of heat()) {
    if (Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; }
  }
  return low < high ? [Math.floor(low), Math.ceil(high)] : [-1, 1];
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Stands in a heat map of ratios for a site that follows from the first divergence: above what is within its floor
// (0 at most, as a logarithm), and below what is above it.
const FOLLOWS = Math.fround(1e-9);

// Colors of a quantity between the ends of its scale, as 32-bit pixels; then those of zero, of infinity, of what follows.
const LEVELS = 512;
function palette(quantity) {
  const stops = LOOK.stops[isDark() ? "dark" : "light"], about = LOOK.quantities[quantity];
  const [low, high] = about.range ?? rangeOfHeat(), own = about.stops;
  const marks = stops[own].map(([at, hex]) => [own === "size" ? low + at * (high - low) : at, rgb(hex)]);
  const pixels = new Uint32Array(LEVELS + 3);
  for (let level = 0; level < LEVELS; level++) {
    const value = low + (level / (LEVELS - 1)) * (high - low);
    let next = marks.findIndex(([at]) => at > value);
    if (next < 0) next = marks.length - 1;
    next = Math.max(1, next);
    const [from, start] = marks[next - 1], [to, end] = marks[next];
    const part = Math.max(0, Math.min(1, (value - from) / (to - from)));
    pixels[level] = pixel(start.map((one, at) => one + part * (end[at] - one)));
  }
  pixels[LEVELS] = pixel(rgb(stops.zero));
  pixels[LEVELS + 1] = pixel(rgb(stops.infinite));
  pixels[LEVELS + 2] = pixel(rgb(stops.follows));
  return { pixels, low, high };
}

function pixel([red, green, blue]) {
  return (255 << 24 | Math.round(blue) << 16 | Math.round(green) << 8 | Math.round(red)) >>> 0;
}

function colorOf({ pixels, low, high }, value) {
  if (value === Infinity) return pixels[LEVELS + 1];
  if (value === -Infinity) return pixels[LEVELS];
  if (value === FOLLOWS) return pixels[LEVELS + 2];
  const level = Math.round(((value - low) / (high - low)) * (LEVELS - 1));
  return pixels[level < 0 ? 0 : level >= LEVELS ? LEVELS - 1 : level];
}

function colorText(number) {
  return `rgb(${number & 255}, ${(number >> 8) & 255}, ${(number >> 16) & 255})`;
}
