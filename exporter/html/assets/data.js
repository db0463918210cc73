"use strict";
/* What the page holds: of each run columns of requests and gauges, inflated; and the ids that follow from its own.

Charts read a run's columns whenever they draw: put others in their place, and `paintAll` shows them. */

const DATA = JSON.parse(document.getElementById("data").textContent);

/* Inflate what a run holds in place: its `columns` by name, its `gauges` with times and values, its `gaps`. */
async function openRun(run) {
  const [columns, read, gaps] = await Promise.all([run.requests, run.gaugesAt, run.gaps].map(unpack));
  const gauges = run.gauges.map((gauge, at) => ({ ...gauge, times: read[`time${at}`].values, values: read[`value${at}`].values }));
  return Object.assign(run, { columns: derive(columns, run.parts), gauges, gaps });
}

async function inflate(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/* Columns by name: numbers as Float64Array, NaN where missing; of texts also `texts`, which the numbers stand for. */
async function unpack(table) {
  const bytes = await inflate(table.bytes);
  const columns = {};
  let at = 0;
  for (const column of table.columns) {
    columns[column.name] = { values: numbers(bytes, at, column), texts: column.texts };
    at += column.width * column.count;
  }
  return columns;
}

function numbers(bytes, at, { count, width, offset, unit, differences }) {
  const values = new Float64Array(count);
  const perUnit = unit < 1 ? Math.round(1 / unit) : 0; // dividing rounds to the nearest decimal, multiplying does not
  let position = 0;
  for (let i = 0; i < count; i++) {
    let code = 0;
    for (let k = width - 1; k >= 0; k--) code = code * 256 + bytes[at + k * count + i];
    if (!code) { values[i] = NaN; continue; }
    position = code - 1 + offset + (differences ? position : 0);
    values[i] = perUnit ? position / perUnit : position * unit;
  }
  return values;
}

const valueOf = (columns, name, row) => (columns[name] ? columns[name].values[row] : NaN);

function textOf(columns, name, row) {
  const column = columns[name];
  const value = column ? column.values[row] : NaN;
  return Number.isNaN(value) ? "" : column.texts[value];
}

/* Add what follows from the columns: which requests have a breakdown, and of each what no source tells apart. */
function derive(columns, parts) {
  const ttft = columns.ttft ? columns.ttft.values : new Float64Array(columns.sent.values.length).fill(NaN);
  const covered = Uint8Array.from(ttft, (value, row) => value === value && !["none", ""].includes(textOf(columns, "source", row)));
  const other = Float64Array.from(ttft, (value, row) => (covered[row] ? value : NaN));
  for (const { name } of parts) {
    if (name === "other" || !columns[name]) continue;
    columns[name].values.forEach((value, row) => { other[row] -= value || 0; });
  }
  return Object.assign(columns, { ttft: { values: ttft }, covered: { values: covered }, other: { values: other } });
}

/* What is worked out of columns once, by a name; of others in their place, anew. */
const WORKED_OUT = new WeakMap();
function once(columns, name, work) {
  if (!WORKED_OUT.has(columns)) WORKED_OUT.set(columns, {});
  return (WORKED_OUT.get(columns)[name] ??= work());
}

/* The parts of TTFT that are known of a run's requests. */
const partsOf = ({ parts, columns }) => parts.filter(({ name }) => columns[name]);

const isFailed = (columns, row) => !["ok", "left", "in_flight"].includes(textOf(columns, "status", row));

const isCovered = (columns, row) => columns.covered.values[row] === 1;

/* BLAKE2b of a text of at most 128 bytes (RFC 7693), as hex. */
const IV = [0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n];
const SIGMA = ["0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8",
  "905724afe1bc683d", "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a",
  "6fe9b308c2d714a5", "a2847615fb9e3cd0", "0123456789abcdef", "ea489fd61c02b753"]
  .map((row) => Array.from(row, (digit) => parseInt(digit, 16)));
const COLUMNS_AND_DIAGONALS = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]];

function blake2b(text, size, person) {
  const bytes = new TextEncoder().encode(text);
  const block = new Uint8Array(128);
  block.set(bytes);
  const words = new BigUint64Array(block.buffer);
  const named = new Uint8Array(16);
  named.set(new TextEncoder().encode(person));
  const h = BigUint64Array.from(IV);
  h[0] ^= 0x01010000n ^ BigInt(size);
  new BigUint64Array(named.buffer).forEach((word, i) => { h[6 + i] ^= word; });
  const v = BigUint64Array.of(...h, ...IV);
  v[12] ^= BigInt(bytes.length);
  v[14] = ~v[14];
  const turn = (x, y, by) => {
    const z = v[x] ^ v[y];
    v[x] = (z >> BigInt(by)) | (z << BigInt(64 - by));
  };
  for (const order of SIGMA) {
    COLUMNS_AND_DIAGONALS.forEach(([a, b, c, d], i) => {
      v[a] += v[b] + words[order[2 * i]]; turn(d, a, 32);
      v[c] += v[d]; turn(b, c, 24);
      v[a] += v[b] + words[order[2 * i + 1]]; turn(d, a, 16);
      v[c] += v[d]; turn(b, c, 63);
    });
  }
  for (let i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
  return Array.from(new Uint8Array(h.buffer, 0, size), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function traceId({ run, columns }, row) {
  if (columns.trace_id) return textOf(columns, "trace_id", row);
  return blake2b(`${run}/${valueOf(columns, "index", row)}`, 16, "trace");
}

function requestId({ run, columns }, row) {
  if (columns.trace_id) return textOf(columns, "request_id", row);
  const index = valueOf(columns, "index", row);
  const digest = blake2b(`${run}/${index}`, 9, "request");
  return `${digest.slice(0, 8)}-${digest.slice(8, 12)}-4${digest.slice(12, 15)}-8${digest.slice(15)}-${String(index).padStart(12, "0")}`;
}
