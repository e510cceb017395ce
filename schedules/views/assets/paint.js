// How things look: every function draws one kind of thing and knows nothing of zooming or hovering.

const ratio = () => window.devicePixelRatio || 1;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = (size, weight = 400) => `${weight} ${size}px system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif`;
const INK = "#15181c"; // on the colours of the kinds, in both themes

function surface(canvas, width, height) {
  canvas.width = Math.round(width * ratio());
  canvas.height = Math.round(height * ratio());
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio(), 0, 0, ratio(), 0, 0);
  pen.textBaseline = "middle";
  return pen;
}

const rgb = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));

function blend(from, to, share) {
  return from.map((part, i) => Math.round(part + (to[i] - part) * share));
}

const text = parts => `rgb(${parts.join(" ")})`;

// One tile of a cause's pattern; the patterns differ, so colour is never the only difference.
const strokes = {
  "/": [[-1, 7, 1, 5], [0, 6, 6, 0], [5, 1, 7, -1]], "\\": [[-1, -1, 7, 7], [-1, 5, 1, 7], [5, -1, 7, 1]],
  "x": [[0, 0, 6, 6], [0, 6, 6, 0]], "|": [[3, 0, 3, 6]], "-": [[0, 3, 6, 3]],
  "+": [[3, 0, 3, 6], [0, 3, 6, 3]], ".": [[2, 3, 4, 3]],
};

function hatch(pen, cause) {
  const size = 6, tile = document.createElement("canvas");
  tile.width = tile.height = size * ratio();
  const ink = tile.getContext("2d");
  ink.scale(ratio(), ratio());
  ink.fillStyle = css("--bubble");
  ink.fillRect(0, 0, size, size);
  ink.strokeStyle = cause.colour || css("--hatch");
  ink.lineWidth = cause.hatch === "." ? 2 : 0.9;
  for (const [x0, y0, x1, y1] of strokes[cause.hatch]) {
    ink.beginPath(); ink.moveTo(x0, y0); ink.lineTo(x1, y1); ink.stroke();
  }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio()));
  return pattern;
}

// Numbers at 1, 2 or 5 times a power of ten, about `room` pixels apart.
function ticks(view, width, room = 90) {
  const rough = ((view.to - view.from) * room) / width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough);
  const marks = [];
  for (let k = Math.ceil(view.from / step); k * step <= view.to * (1 + 1e-12); k++) marks.push(k * step);
  return marks;
}

function paintAxis(pen, box, view, scale) {
  pen.font = font(11);
  pen.fillStyle = css("--soft");
  pen.strokeStyle = css("--line");
  pen.textAlign = "center";
  const marks = ticks(view, box.width);
  for (const mark of marks) {
    const x = Math.round(scale(mark)) + 0.5;
    pen.beginPath(); pen.moveTo(x, box.height - 5); pen.lineTo(x, box.height); pen.stroke();
    pen.fillText(duration(mark, marks.at(-1)), Math.max(box.left + 8, x), box.height - 14);
  }
}

// One row of a rank. Where spans are narrower than two pixels each pixel shows the mixture of what runs in it,
// and only the wider bubbles are hatched.
function paintRow(pen, row, y, height, view, scale, { patterns, shades, digits }) {
  const first = after(row.end, view.from);
  const last = after(row.start, view.to);
  const pixels = scale(view.to) - scale(view.from);
  if (last - first > pixels / 2) {
    paintMixture(pen, row, first, last, y, height, view, scale);
    return paintBubbles(pen, row.bubbles, y, height, view, scale, patterns, 4);
  }
  paintBubbles(pen, row.bubbles, y, height, view, scale, patterns);
  const named = (row.typical * pixels) / (view.to - view.from) > 40;
  const left = scale(view.from), right = scale(view.to);
  pen.textAlign = "center";
  for (let i = first; i < last; i++) {
    const x = Math.max(left, scale(row.start[i])), end = Math.min(right, scale(row.end[i]));
    const width = Math.max(0.5, end - x - (end - x > 3 ? 0.75 : 0)); // a hair of background between neighbours
    const partner = partnerOf(row, i);
    const half = partner < 0 ? height : height / 2, top = partner >= 0 && partner < i ? y + half : y;
    pen.fillStyle = shades[row.kind[i]][row.chunk[i]];
    pen.fillRect(x, top, width, half);
    const label = row.kind[i] === STEP ? "step" : named && partner < 0 ? actionText(row, i) : String(row.batch[i]);
    // A number has the room of the longest one, so that all of a kind are shown or none.
    if (half >= 9 && width >= (half >= 15 ? 6.2 : 5.2) * Math.max(digits, label.length) + 1.5) {
      pen.font = font(half < 15 ? 9 : width < 7 * label.length + 3 ? 10 : 11);
      pen.fillStyle = INK;
      pen.fillText(label, x + width / 2, top + half / 2 + 0.5);
    }
  }
}

function paintBubbles(pen, bubbles, y, height, view, scale, patterns, least = 0) {
  const left = scale(view.from), right = scale(view.to);
  pen.textAlign = "center";
  pen.font = font(height >= 20 ? 11 : 9);
  for (let i = after(bubbles.end, view.from); i < bubbles.end.length && bubbles.start[i] < view.to; i++) {
    const x = Math.max(left, scale(bubbles.start[i])), width = Math.min(right, scale(bubbles.end[i])) - x;
    if (width < least) continue;
    pen.fillStyle = patterns[bubbles.cause[i]];
    pen.fillRect(x, y, width, height);
    const name = page.causes[bubbles.cause[i]].name, room = pen.measureText(name).width;
    if (height < 12 || width < room + 10) continue;
    pen.fillStyle = css("--bubble");
    pen.fillRect(x + (width - room) / 2 - 3, y + height / 2 - 7, room + 6, 14);
    pen.fillStyle = css("--soft");
    pen.fillText(name, x + width / 2, y + height / 2 + 0.5);
  }
}

function paintMixture(pen, row, first, last, y, height, view, scale) {
  const left = scale(view.from), columns = Math.max(1, Math.round(scale(view.to) - left));
  const shares = new Float32Array(columns * page.kinds.length);
  const perColumn = columns / (view.to - view.from);
  for (let i = first; i < last; i++) {
    const from = Math.max(0, (row.start[i] - view.from) * perColumn), to = Math.min(columns, (row.end[i] - view.from) * perColumn);
    const share = partnerOf(row, i) < 0 ? 1 : 0.5;
    for (let c = Math.floor(from); c < to; c++)
      shares[c * page.kinds.length + row.kind[i]] += share * (Math.min(to, c + 1) - Math.max(from, c));
  }
  paintShares(pen, shares, 1, columns, { x: left, y, width: columns, height });
}

// A grid of shares (rows × columns × kinds, each at most `whole`) as mixed colours; what is left over is idle.
function paintShares(pen, shares, rows, columns, box, whole = 1) {
  const image = new ImageData(columns, rows), kinds = page.kinds.map(kind => rgb(kind.colour));
  const idle = page.dark ? rgb("#2b323a") : rgb("#e4e5e3");
  for (let cell = 0; cell < rows * columns; cell++) {
    const mixed = [0, 0, 0];
    let left = 1;
    for (let k = 0; k < kinds.length; k++) {
      const share = Math.min(left, shares[cell * kinds.length + k] / whole);
      left -= share;
      for (let c = 0; c < 3; c++) mixed[c] += share * kinds[k][c];
    }
    for (let c = 0; c < 3; c++) image.data[4 * cell + c] = mixed[c] + left * idle[c];
    image.data[4 * cell + 3] = 255;
  }
  const small = document.createElement("canvas");
  small.width = columns; small.height = rows;
  small.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, box.x, box.y, box.width, box.height);
}

// What else a rank does beside computing: one thin line a track.
function paintExtra(pen, row, y, view, scale) {
  const left = scale(view.from), right = scale(view.to);
  row.extra.forEach((track, line) => {
    pen.fillStyle = page.tracks[track.track] || css("--soft");
    for (let i = after(track.end, view.from); i < track.end.length && track.start[i] < view.to; i++) {
      const x = Math.max(left, scale(track.start[i]));
      pen.fillRect(x, y + 5 * line, Math.max(1, Math.min(right, scale(track.end[i])) - x), 4);
    }
  });
}

// First rank blue, last rank vermilion, or what of them is bright enough in the dark.
const rankColour = share => text(page.dark ? blend(rgb("#56B4E9"), rgb("#E69F00"), share) : blend(rgb("#0072B2"), rgb("#D55E00"), share));

function paintMemory(pen, timeline, box, view, scale, highest) {
  const level = live => box.y + box.height - (live / highest) * (box.height - 6);
  pen.strokeStyle = css("--line");
  pen.fillStyle = css("--soft");
  pen.font = font(10);
  pen.textAlign = "right";
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find(k => highest / k <= 4) || highest;
  for (let live = 0; live <= highest; live += step) {
    const y = Math.round(level(live)) + 0.5;
    pen.beginPath(); pen.moveTo(scale(view.from), y); pen.lineTo(scale(view.to), y); pen.stroke();
    pen.fillText(String(live), scale(view.from) - 6, y);
  }
  timeline.rows.forEach((row, index) => {
    pen.strokeStyle = rankColour(timeline.rows.length > 1 ? index / (timeline.rows.length - 1) : 0);
    pen.globalAlpha = timeline.rows.length > 16 ? 0.5 : 0.9;
    pen.lineWidth = 1.3;
    paintSteps(pen, row.memory, view, scale, level);
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
  });
}

// A step line. Of points that share a pixel only what rises above both sides shows: when a pass frees what the next one
// takes at once, no notch is drawn that nobody could use.
function paintSteps(pen, memory, view, scale, level) {
  let i = Math.max(0, after(memory.time, view.from) - 1);
  let y = level(memory.live.length ? memory.live[i] : 0);
  pen.beginPath();
  pen.moveTo(scale(view.from), y);
  while (i < memory.time.length && memory.time[i] <= view.to) {
    const x = Math.max(scale(view.from), scale(memory.time[i]));
    let top = y;
    pen.lineTo(x, y);
    for (; i < memory.time.length && scale(memory.time[i]) < x + 0.7; i++) {
      y = level(memory.live[i]);
      top = Math.min(top, y);
    }
    pen.lineTo(x, top); pen.lineTo(x, y);
  }
  pen.lineTo(scale(Math.min(view.to, page.end)), y);
  pen.stroke();
}
