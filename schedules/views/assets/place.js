// Where things stand in the page and which part of the step is in view; draw() paints all of it.

const $ = id => document.getElementById(id);
const GUTTER = { left: 74, right: 132 }, AXIS = 26, MEMORY = 104, WINDOW = 16;
const state = { from: 0, to: page.end, byRank: false, critical: false, first: 0, x: null, y: null, seen: null };
let layout, patterns, width, inner; // where things are, measured by every draw: pixels of the chart and of its time axis

const scale = time => GUTTER.left + ((time - state.from) / (state.to - state.from)) * inner;
const timeAt = x => state.from + ((x - GUTTER.left) / inner) * (state.to - state.from);

// The rows that are drawn: all of them up to 64 ranks, else a window of 16 which the overview moves.
function rowsOf(timeline) {
  return timeline.overview ? timeline.rows.slice(state.first, state.first + WINDOW) : timeline.rows;
}

function arrange() {
  const shown = Math.max(...page.timelines.map(timeline => rowsOf(timeline).length));
  const tall = shown <= 8 ? 28 : shown <= 16 ? 22 : shown <= 32 ? 16 : 12;
  const items = [];
  let y = 6;
  const addRow = (timeline, row, label) => {
    items.push({ what: "row", timeline, row, label, y, height: tall });
    y += tall + 3 + 5 * row.extra.length;
  };
  const addMemory = timeline => {
    y += 8;
    items.push({ what: "memory", timeline, y, height: MEMORY });
    y += MEMORY + 22;
  };
  const addTitle = words => {
    items.push({ what: "title", words, y, height: 22 });
    y += 24;
  };
  if (state.byRank) {
    addTitle(page.timelines.map(timeline => timeline.title).join(" over "));
    for (let r = 0; r < shown; r++) {
      page.timelines.forEach((timeline, index) => {
        const row = rowsOf(timeline)[r];
        if (row) addRow(timeline, row, index === 0 ? `rank ${row.rank}` : "");
      });
      y += 6;
    }
    page.timelines.forEach(addMemory);
  } else {
    for (const timeline of page.timelines) {
      addTitle(timeline.title);
      for (const row of rowsOf(timeline)) addRow(timeline, row, `rank ${row.rank}`);
      addMemory(timeline);
    }
  }
  return { items, height: y };
}

function draw() {
  page.dark = document.documentElement.dataset.theme === "dark";
  width = $("chart").clientWidth;
  inner = Math.max(50, width - GUTTER.left - GUTTER.right);
  layout = arrange();
  paintAxis(surface($("axis"), width, AXIS),
    { left: GUTTER.left, width: inner, height: AXIS }, state, scale);
  const pen = surface($("rows"), width, layout.height);
  patterns = page.causes.map(cause => hatch(pen, cause));
  const highest = Math.max(1e-9, ...page.timelines.map(timeline => Math.max(...timeline.peaks)));
  for (const item of layout.items) {
    if (item.what === "title") {
      pen.font = font(13, 650);
      pen.fillStyle = css("--ink");
      pen.textAlign = "left";
      pen.fillText(item.words, 0, item.y + 11);
      pen.font = font(11);
      pen.fillStyle = css("--soft");
      pen.fillText("idle", GUTTER.left + inner + 10, item.y + 12);
      pen.fillText("by cause", GUTTER.left + inner + 62, item.y + 12);
    } else if (item.what === "row") {
      drawRow(pen, item);
    } else {
      drawMemory(pen, item, highest);
    }
  }
  for (const timeline of page.timelines) drawEnd(pen, timeline);
  page.timelines.forEach(drawOverview);
  drawOver();
}

function drawRow(pen, { timeline, row, label, y, height }) {
  pen.font = font(height >= 16 ? 12 : 10);
  pen.fillStyle = css("--soft");
  pen.textAlign = "right";
  pen.fillText(label, GUTTER.left - 8, y + height / 2 + 0.5);
  paintRow(pen, row, y, height, state, scale, { patterns, shades: timeline.shades, digits: timeline.digits });
  paintExtra(pen, row, y + height + 1, state, scale);
  if (state.critical) {
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1.6;
    for (const i of row.critical) outline(pen, row, i, y, height);
    pen.lineWidth = 1;
  }
  const x = GUTTER.left + inner + 10;
  pen.textAlign = "left";
  pen.fillStyle = css("--ink");
  pen.fillText(percent(row.idle), x, y + height / 2 + 0.5);
  let left = x + 52;
  page.causes.forEach((cause, index) => { // how the idle share divides into causes, the full bar being the step
    const share = row.causes[index] * (GUTTER.right - 66);
    pen.fillStyle = patterns[index];
    pen.fillRect(left, y + 2, share, height - 4);
    left += share;
  });
  pen.strokeStyle = css("--line");
  pen.strokeRect(x + 52.5, y + 2.5, GUTTER.right - 67, height - 5);
}

function drawMemory(pen, { timeline, y, height }, highest) {
  const rows = rowsOf(timeline);
  paintMemory(pen, { ...timeline, rows }, { y, height }, state, scale, highest);
  pen.font = font(11);
  pen.textAlign = "left";
  pen.fillStyle = css("--soft");
  pen.fillText(`${state.byRank ? `${timeline.title}: ` : ""}live activations a rank (micro-batches)`, GUTTER.left + 2, y + height + 11);
  const named = rows.length <= 8 ? rows : [rows[0], rows[rows.length - 1]];
  named.forEach((row, index) => {
    const share = rows.length > 1 ? rows.indexOf(row) / (rows.length - 1) : 0;
    pen.fillStyle = rankColour(share);
    pen.fillRect(GUTTER.left + inner + 10, y + 7 + 13 * index, 12, 2);
    pen.fillStyle = css("--soft");
    pen.fillText(`rank ${row.rank}: peak ${amount(timeline.peaks[row.rank])}`, GUTTER.left + inner + 27, y + 8 + 13 * index);
  });
}

// Where the step ends, as a line through the timeline's rows.
function drawEnd(pen, timeline) {
  const mine = layout.items.filter(item => item.timeline === timeline && item.what === "row");
  if (timeline.step < state.from || timeline.step > state.to || !mine.length || state.byRank) return;
  const x = Math.round(scale(timeline.step)) + 0.5;
  pen.strokeStyle = css("--soft");
  pen.setLineDash([3, 3]);
  pen.beginPath(); pen.moveTo(x, mine[0].y - 3); pen.lineTo(x, mine.at(-1).y + mine.at(-1).height + 3); pen.stroke();
  pen.setLineDash([]);
  const words = `step ${duration(timeline.step)}`;
  pen.textAlign = "left";
  pen.font = font(11);
  if (GUTTER.left + inner - x < pen.measureText(words).width + 8) return;
  pen.fillStyle = css("--soft");
  pen.fillText(words, x + 6, mine[0].y + mine[0].height / 2);
}

function drawOverview(timeline) {
  if (!timeline.overview) return;
  const { rows, columns, cells } = timeline.overview;
  const canvas = $(`overview-${timeline.index}`), height = rows * Math.max(2, Math.floor(256 / rows));
  const pen = surface(canvas, width, height + 20);
  pen.font = font(13, 650);
  pen.fillStyle = css("--ink");
  const some = timeline.rows.length < timeline.ranks ? `, ${timeline.rows.length} of them in detail below` : "";
  pen.fillText(`${timeline.title}: all ${timeline.ranks} ranks${some}`, 0, 8);
  const box = { x: GUTTER.left, y: 20, width: inner, height };
  paintShares(pen, cells, rows, columns, { ...box, width: box.width * (timeline.step / page.end) }, 255);
  pen.font = font(11);
  pen.textAlign = "right";
  pen.fillStyle = css("--soft");
  pen.fillText("rank 0", GUTTER.left - 8, 26);
  pen.fillText(`rank ${timeline.ranks - 1}`, GUTTER.left - 8, 20 + height - 6);
  const seen = rowsOf(timeline);
  const top = 20 + (seen[0].rank / timeline.ranks) * height, bottom = 20 + ((seen.at(-1).rank + 1) / timeline.ranks) * height;
  const left = box.x + (state.from / page.end) * box.width, right = box.x + (state.to / page.end) * box.width;
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 2;
  pen.strokeRect(left, top, right - left, Math.max(3, bottom - top));
}

function outline(pen, row, i, y, height) {
  const x = Math.max(GUTTER.left, scale(row.start[i])), end = Math.min(GUTTER.left + inner, scale(row.end[i]));
  if (end > x) pen.strokeRect(x + 0.5, y + 0.5, Math.max(1, end - x - 1.5), height - 1);
}

// The pointer's line, the micro-batch under it wherever it runs, or the action that a bubble waits for.
function drawOver() {
  const pen = surface($("over"), width, AXIS + layout.height);
  if (state.x === null) return;
  pen.translate(0, AXIS);
  pen.strokeStyle = css("--cursor");
  pen.lineWidth = 2;
  const seen = state.seen;
  for (const item of layout.items) {
    if (item.what !== "row" || !seen) continue;
    const { row, timeline, y, height } = item;
    if (seen.span !== undefined) {
      const batch = seen.row.batch[seen.span];
      for (let i = after(row.end, state.from); i < row.end.length && row.start[i] < state.to; i++)
        if (row.batch[i] === batch) outline(pen, row, i, y, height);
    } else if (seen.found && seen.found[0] === row && timeline === seen.timeline) {
      outline(pen, row, seen.found[1], y, height);
    }
  }
  if (state.x < GUTTER.left || state.x > GUTTER.left + inner) return;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.5;
  pen.beginPath(); pen.moveTo(Math.round(state.x) + 0.5, 0); pen.lineTo(Math.round(state.x) + 0.5, layout.height); pen.stroke();
}
