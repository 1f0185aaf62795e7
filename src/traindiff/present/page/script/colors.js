// Colors of the heat map: cool up to the floor, hot above it; those of lines come from the style sheet.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const STOPS = {
  light: {
    floor: [[-3, "#e3eaf2"], [-0.001, "#6f9fd0"], [0, "#ffd23f"], [1, "#f58220"], [2.5, "#d01c3a"], [4, "#7a0f4f"]],
    around: [[-3, "#1f5fa8"], [-0.3, "#cfe0f0"], [0, "#f0f2f5"], [0.3, "#fbe3c8"], [1.5, "#e8672a"], [3, "#9c1147"]],
    size: [[0, "#eef3f8"], [0.35, "#9cc3df"], [0.7, "#3c7cb5"], [1, "#12315e"]],
    zero: "#dff0e5", infinite: "#2b0024",
  },
  dark: {
    floor: [[-3, "#182433"], [-0.001, "#3a6ea5"], [0, "#a8760a"], [1, "#f28a2e"], [2.5, "#ff5a64"], [4, "#ffc9ec"]],
    around: [[-3, "#7cc0ff"], [-0.3, "#22405f"], [0, "#1a222d"], [0.3, "#553215"], [1.5, "#f07f35"], [3, "#ffd0b0"]],
    size: [[0, "#16202c"], [0.35, "#24486d"], [0.7, "#4f94d4"], [1, "#cfe7ff"]],
    zero: "#14291e", infinite: "#ffffff",
  },
};

// Per quantity: its name, its scale (from and to, as log10), its colors, and the marks of the legend.
const QUANTITIES = {
  ratio: { name: "difference over floor", range: () => [-3, 4], stops: "floor", unit: "x floor", zero: "same bits" },
  difference: { name: "relative L2 difference", range: () => [-9, 1], stops: "size", unit: "", zero: "same bits" },
  relative: { name: "L2 norm over its median at the site", range: () => [-3, 3], stops: "around", unit: "x median", zero: "0" },
  size: { name: "L2 norm", range: rangeOfHeat, stops: "size", unit: "", zero: "0" },
  largest: { name: "largest |x|", range: rangeOfHeat, stops: "size", unit: "", zero: "0" },
  zero: { name: "share of zeros", range: () => [-4, 0], stops: "size", unit: "", zero: "none" },
  nonfinite: { name: "share that is not finite", range: () => [-4, 0], stops: "size", unit: "", zero: "none" },
};

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

// Colors of a quantity between the ends of its scale, as 32-bit pixels; then those of zero and of infinity.
const LEVELS = 512;
function palette(quantity) {
  const stops = STOPS[isDark() ? "dark" : "light"], [low, high] = QUANTITIES[quantity].range();
  const own = QUANTITIES[quantity].stops;
  const marks = stops[own].map(([at, hex]) => [own === "size" ? low + at * (high - low) : at, rgb(hex)]);
  const pixels = new Uint32Array(LEVELS + 2);
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
  return { pixels, low, high };
}

function pixel([red, green, blue]) {
  return (255 << 24 | Math.round(blue) << 16 | Math.round(green) << 8 | Math.round(red)) >>> 0;
}

function colorOf({ pixels, low, high }, value) {
  if (value === Infinity) return pixels[LEVELS + 1];
  if (value === -Infinity) return pixels[LEVELS];
  const level = Math.round(((value - low) / (high - low)) * (LEVELS - 1));
  return pixels[level < 0 ? 0 : level >= LEVELS ? LEVELS - 1 : level];
}

function colorText(number) {
  return `rgb(${number & 255}, ${(number >> 8) & 255}, ${(number >> 16) & 255})`;
}
