"use strict";
// What the page was given: unpacked once, then asked "what lies here?".

const page = JSON.parse(document.getElementById("data").textContent);

// Fill the rows of all timelines from the packed numbers.
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("numbers").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const numbers = await new Response(stream).arrayBuffer();
  page.timelines.forEach((timeline, index) => {
    timeline.index = index;
    timeline.rows = timeline.rows.map(row => unpackRow(row, numbers));
    timeline.typical = shortSpan(timeline.rows);
    if (timeline.overview) timeline.overview.cells = new Uint8Array(numbers, ...timeline.overview.cells);
  });
}

function unpackRow(row, numbers) {
  // Times are whole ticks of 1 / (2^32 - 1) of the time axis.
  const times = place => Float64Array.from(new Uint32Array(numbers, ...place), tick => tick * (page.end / 4294967295));
  const { bubbles, memory } = row;
  return {
    ...row,
    start: times(row.start), end: times(row.end),
    stage: new Uint32Array(numbers, ...row.stage), batch: new Uint32Array(numbers, ...row.batch),
    kind: new Uint8Array(numbers, ...row.kind), chunk: new Uint8Array(numbers, ...row.chunk),
    half: new Uint8Array(numbers, ...row.half),
    bubbles: {
      start: times(bubbles.start), end: times(bubbles.end), cause: new Uint8Array(numbers, ...bubbles.cause),
      waits: new TextDecoder().decode(new Uint8Array(numbers, ...bubbles.waits)).split(","),
    },
    memory: { time: times(memory.time), live: new Float32Array(numbers, ...memory.live) },
    extra: row.extra.map(track => ({ ...track, start: times(track.start), end: times(track.end) })),
    critical: new Set(row.critical),
  };
}

// A length that nine of ten passes reach.
function shortSpan(rows) {
  const lengths = rows.flatMap(row => Array.from(row.end.subarray(0, 2000), (end, i) => end - row.start[i]));
  return lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 10)] || 0;
}

// The first index whose value is greater than `limit` in a sorted array.
function after(sorted, limit) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

// The index of the interval that holds `time`, or -1.
function at(intervals, time) {
  const i = after(intervals.end, time);
  return i < intervals.end.length && intervals.start[i] <= time ? i : -1;
}

const STEP = page.kinds.length - 1; // what a rank does that is no pass stands last

const oneAction = (row, i) => `${row.stage[i]}${page.kinds[row.kind[i]].name}${row.batch[i]}`;

function actionText(row, i) {
  const partner = partnerOf(row, i);
  return partner < 0 ? oneAction(row, i) : `${oneAction(row, Math.min(i, partner))} + ${oneAction(row, Math.max(i, partner))}`;
}

// The other half of two actions that run as one; they are neighbours.
const partnerOf = (row, i) => (row.half[i] === 0 ? -1 : row.half[i] === 1 ? i + 1 : i - 1);

function memoryAt(row, time) {
  const i = after(row.memory.time, time) - 1;
  return i < 0 ? 0 : row.memory.live[i];
}

// Where an action such as "1F3" (of "1F3 + 2B0" the first) lies in a timeline: [row, index], or null when its rank is not shown in detail.
function find(timeline, action) {
  const parts = /(\d+)([A-Z])(\d+)/.exec(action || "");
  if (!parts) return null;
  const kind = page.kinds.findIndex(one => one.name === parts[2]);
  const stage = Number(parts[1]), batch = Number(parts[3]);
  for (const row of timeline.rows) {
    if (!row.stages.includes(stage)) continue;
    for (let i = 0; i < row.kind.length; i++)
      if (row.batch[i] === batch && row.kind[i] === kind && row.stage[i] === stage) return [row, i];
  }
  return null;
}

// Numbers as people write them: 3 or 4 significant digits, and for seconds the prefix that fits.
function amount(value) {
  const size = Math.abs(value);
  return String(Number(size >= 1000 ? value.toFixed(0) : value.toPrecision(4)));
}

// With `like`, in the prefix that fits that time, as along an axis.
function duration(value, like = value) {
  if (page.unit !== "s") return `${amount(value)} ${page.unit}`.trim();
  const size = Math.abs(like);
  const [scale, name] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${amount(value / scale)} ${name}`;
}

const percent = share => `${(100 * share).toFixed(1)} %`;
