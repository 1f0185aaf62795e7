// Arrays of the page: deflated bytes in base 64, those of the same significance together.

const MISSING = 0, ZERO = 1, INFINITE = 65535;
const LOWEST = -64, LOG2_STEP = 192 / 65531;

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

async function unpacked(block) {
  const kind = { Uint16Array, Float32Array, Float64Array }[block.type];
  const stream = new Blob([bytesOf(block.data)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = kind.BYTES_PER_ELEMENT, count = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    for (let at = 0, from = plane * count, to = plane; at < count; at++, to += size) bytes[to] = planes[from + at];
  }
  return new kind(bytes.buffer);
}

// The size that a code stands for: NaN for none.
function sizeOf(code) {
  if (code === MISSING) return NaN;
  if (code === ZERO) return 0;
  return code === INFINITE ? Infinity : 2 ** (LOWEST + (code - 2) * LOG2_STEP);
}

const LOG10 = new Float32Array(65536);
for (let code = 2; code < INFINITE; code++) LOG10[code] = (LOWEST + (code - 2) * LOG2_STEP) * Math.LOG10E * Math.LN2;
LOG10[MISSING] = NaN;
LOG10[ZERO] = -Infinity;
LOG10[INFINITE] = Infinity;
