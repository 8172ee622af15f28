// Unpacks columns of numbers, and formats numbers and texts.

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Name -> typed array, from columns that `columns.pack` wrote. */
async function unpack(columns) {
  const names = Object.keys(columns);
  const arrays = await Promise.all(names.map(async (name) => {
    const [dtype, text] = columns[name];
    return new TYPES[dtype](await inflate(text));
  }));
  return Object.fromEntries(names.map((name, at) => [name, arrays[at]]));
}

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

function digits(value, count = 3) {
  if (!value) return "0";
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-GB", { minimumFractionDigits: Math.min(places, 6), maximumFractionDigits: Math.min(places, 6) });
}

function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (Math.abs(count) >= 1000 && at < units.length - 1) { count /= 1000; at += 1; }
  return `${at ? digits(count) : whole.format(count)} ${units[at]}`;
}

const time = (us) => (Math.abs(us) >= 1000 ? `${digits(us / 1000)} ms` : `${digits(us)} µs`);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const pairs = (count) => (count < 1e6 ? whole.format(count) : count < 1e9 ? `${digits(count / 1e6)} M` : `${digits(count / 1e9)} G`);
/** Tokens on an axis whose ticks are `step` apart. */
function tokensAt(value, step) {
  if (step >= 1e5 && value >= 1e6) return `${Number((value / 1e6).toFixed(1))} M`;
  return step >= 1000 ? `${Math.round(value / 1000)} K` : whole.format(value);
}
/** The text, cut to a maximum length. */
const shorten = (text, most = 220) => (text.length > most ? `${text.slice(0, most)} …` : text);
const UNITS = { bytes, pairs, ms: (value) => `${digits(value, 4)} ms`, count: (value) => whole.format(value), tokens: (value) => whole.format(value), time };

/** An element that contains texts or elements; text is never interpreted as markup. */
function make(tag, options = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...inside.filter((part) => part !== null && part !== undefined));
  return element;
}

/** The last index in sorted `column` [first, end) whose value is at most `value`, or first - 1. */
function lastBelow(column, value, first, end) {
  while (first < end) {
    const middle = (first + end) >> 1;
    if (column[middle] <= value) first = middle + 1; else end = middle;
  }
  return first - 1;
}

/** Indices sorted by group and then by `start`: { ptr, order }. */
function grouped(group, start, groups) {
  const ptr = new Uint32Array(groups + 1);
  for (const number of group) ptr[number + 1] += 1;
  for (let at = 0; at < groups; at += 1) ptr[at + 1] += ptr[at];
  const next = ptr.slice(), order = new Uint32Array(group.length);
  for (let at = 0; at < group.length; at += 1) { order[next[group[at]]] = at; next[group[at]] += 1; }
  for (let at = 0; at < groups; at += 1) order.subarray(ptr[at], ptr[at + 1]).sort((a, b) => start[a] - start[b]);
  return { ptr, order };
}
