"use strict";
// What the page was given: unpacked once, then asked "what lies here?".

const page = JSON.parse(document.getElementById("data").textContent);

function unpack(text, Type) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Type(bytes.buffer);
}

// Times cross as whole ticks of 1 / (2^32 - 1) of the time axis: half the size of doubles, finer than any screen.
function times(text) {
  return Float64Array.from(unpack(text, Uint32Array), tick => tick * (page.end / 4294967295));
}

function unpackRow(row) {
  const bubbles = row.bubbles;
  return {
    ...row,
    start: times(row.start), end: times(row.end),
    stage: unpack(row.stage, Uint32Array), batch: unpack(row.batch, Uint32Array),
    kind: unpack(row.kind, Uint8Array), chunk: unpack(row.chunk, Uint8Array),
    bubbles: {
      start: times(bubbles.start), end: times(bubbles.end), cause: unpack(bubbles.cause, Uint8Array),
      waits: bubbles.waits ? bubbles.waits.split(",") : [],
    },
    memory: { time: times(row.memory.time), live: unpack(row.memory.live, Float32Array) },
    extra: row.extra.map(track => ({ ...track, start: times(track.start), end: times(track.end) })),
    critical: new Set(row.critical),
  };
}

page.timelines.forEach((timeline, index) => {
  timeline.index = index;
  timeline.rows = timeline.rows.map(unpackRow);
  const lengths = timeline.rows.flatMap(row => Array.from(row.end.subarray(0, 2000), (end, i) => end - row.start[i]));
  timeline.typical = lengths.sort((a, b) => a - b)[Math.floor(lengths.length * 0.1)] || 0; // a short span
  if (timeline.overview) timeline.overview.cells = unpack(timeline.overview.cells, Uint8Array);
});

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

// Two actions that run as one are two neighbours with the same times.
function partnerOf(row, i) {
  if (!row.paired) return -1;
  if (i > 0 && row.start[i - 1] === row.start[i] && row.end[i - 1] === row.end[i]) return i - 1;
  return row.start[i + 1] === row.start[i] && row.end[i + 1] === row.end[i] ? i + 1 : -1;
}

function memoryAt(row, time) {
  const i = after(row.memory.time, time) - 1;
  return i < 0 ? 0 : row.memory.live[i];
}

// Where an action such as "1F3" lies in a timeline: [row, index], or null when its rank is not shown in detail.
function find(timeline, action) {
  const parts = /^(\d+)([A-Z])(\d+)$/.exec(action || "");
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
