// What the pointer and the keys do: the tip, zooming, moving, the buttons; and the start of it all.

function look(x, y) {
  const item = layout.items.find(one => y >= one.y - 1 && y <= one.y + one.height + 2);
  const time = timeAt(x);
  if (!item || item.what === "title" || x < GUTTER.left || x > GUTTER.left + inner) return null;
  if (item.what === "memory") return { ...item, time };
  const span = at(item.row, time), bubble = span < 0 ? at(item.row.bubbles, time) : -1;
  if (span >= 0) {
    const partner = partnerOf(item.row, span); // the lower half of a pair is its second action
    return { ...item, time, span: partner > span && y > item.y + item.height / 2 ? partner : span };
  }
  if (bubble < 0) return null;
  const waits = item.row.bubbles.waits[bubble];
  return { ...item, time, bubble, waits, found: find(item.timeline, waits) };
}

function describe(seen) {
  if (seen.what === "memory") {
    const rows = rowsOf(seen.timeline).slice(0, WINDOW);
    return [`live activations at ${duration(seen.time)}`, rows.map(row => [`rank ${row.rank}`, amount(memoryAt(row, seen.time))])];
  }
  const { row, timeline, span, bubble } = seen, lines = [];
  const add = (name, value) => lines.push([name, value]);
  const since = (list, i) => [list.start[i], list.end[i], list.end[i] - list.start[i]];
  const [start, end, length] = span !== undefined ? since(row, span) : since(row.bubbles, bubble);
  add("from – to", `${duration(start)} – ${duration(end)}`);
  add("takes", duration(length));
  if (span === undefined) {
    add("of the step", percent(length / timeline.step));
    if (seen.waits) add("waits for", seen.waits);
    add("memory then", `${amount(memoryAt(row, seen.time))} live`);
    const cause = page.causes[row.bubbles.cause[bubble]];
    return [`rank ${row.rank} idle, ${cause.name}: ${cause.words}`, lines];
  }
  const action = oneAction(row, span);
  const before = at(row.bubbles, start - length * 1e-3);
  if (before >= 0) {
    const waits = row.bubbles.waits[before];
    const long = duration(row.bubbles.end[before] - row.bubbles.start[before]);
    add("idle before it", `${long}, ${page.causes[row.bubbles.cause[before]].name}${waits ? ` (for ${waits})` : ""}`);
  }
  add("memory at its start", `${amount(memoryAt(row, start))} live`);
  for (const other of page.timelines) {
    const twin = other !== timeline && other.name === timeline.name ? find(other, action) : null;
    if (!twin) continue;
    const takes = twin[0].end[twin[1]] - twin[0].start[twin[1]];
    add(other.title, `${duration(twin[0].start[twin[1]])}, takes ${duration(takes)} (${((100 * (takes - length)) / length).toFixed(1)} %)`);
  }
  const pair = partnerOf(row, span) < 0 ? "" : ` (runs as one: ${actionText(row, span)})`;
  const words = page.kinds[row.kind[span]].words;
  if (row.kind[span] === STEP) return [words, lines];
  return [`${action}: ${words}, micro-batch ${row.batch[span]}, stage ${row.stage[span]}${pair}`, lines];
}

function hover(event) {
  const box = $("rows").getBoundingClientRect();
  state.x = event.clientX - box.left;
  state.y = event.clientY - box.top;
  state.seen = look(state.x, state.y);
  const tip = $("tip");
  tip.hidden = !state.seen;
  if (state.seen) {
    const [title, lines] = describe(state.seen);
    const node = (tag, words) => Object.assign(document.createElement(tag), { textContent: words });
    const list = document.createElement("dl");
    for (const [name, value] of lines) list.append(node("dt", name), node("dd", value));
    tip.replaceChildren(node("b", title), list);
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  }
  drawOver();
}

function leave() {
  state.x = state.seen = null;
  $("tip").hidden = true;
  drawOver();
}

// Show [from, to], kept inside the step and no shorter than a millionth of it.
function show(from, to) {
  const length = Math.min(page.end, Math.max(page.end * 1e-6, to - from));
  state.from = Math.max(0, Math.min(from, page.end - length));
  state.to = state.from + length;
  schedule();
}

function zoom(factor, centre = (state.from + state.to) / 2) {
  show(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
}

const move = share => show(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));

let waiting = false;
function schedule() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function press(id, name) {
  $(id).addEventListener("click", () => {
    state[name] = !state[name];
    $(id).setAttribute("aria-pressed", state[name]);
    schedule();
  });
}

function listen() {
  const chart = $("chart");
  let drag = null;
  chart.addEventListener("pointerdown", event => { drag = { x: event.clientX, from: state.from }; });
  addEventListener("pointerup", () => { drag = null; });
  chart.addEventListener("pointermove", event => {
    if (drag && Math.abs(event.clientX - drag.x) > 2) {
      const length = state.to - state.from, from = drag.from - ((event.clientX - drag.x) / inner) * length;
      show(from, from + length);
    }
    hover(event);
  });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("dblclick", () => show(0, page.end));
  chart.addEventListener("wheel", event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return; // plain scrolling moves the page
    event.preventDefault();
    if (sideways) move(event.deltaX / inner);
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), timeAt(event.clientX - chart.getBoundingClientRect().left));
  }, { passive: false });
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(0, page.end),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
  };
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  $("in").addEventListener("click", keys["+"]);
  $("out").addEventListener("click", keys["-"]);
  $("fit").addEventListener("click", keys["0"]);
  press("by-rank", "byRank");
  press("critical", "critical");
  $("theme").addEventListener("click", () => theme(page.dark ? "light" : "dark"));
  addEventListener("resize", schedule);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  theme(dark.matches ? "dark" : "light");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  draw();
  drawLegend();
}

function drawLegend() {
  const entries = [
    ...page.kinds.filter(kind => kind.used).map(kind => [kind.name, kind.words, () => kind.colour]),
    ...page.timelines.filter(one => one.shades[0].length > 1).slice(0, 1).map(one => ["", page.later, () => one.shades[0].at(-1)]),
    ...page.causes.filter(cause => cause.used).map(cause => ["", cause.name, pen => hatch(pen, cause), `idle, ${cause.name}: ${cause.words}`]),
    ...Object.entries(page.tracks).map(([name, colour]) => ["", name, () => colour]),
  ];
  $("legend").replaceChildren(...entries.map(([letter, words, paint, title]) => {
    const item = document.createElement("li"), swatch = document.createElement("canvas");
    item.title = title || words;
    item.append(swatch, letter.length === 1 ? `${letter} ${words}` : words);
    const pen = surface(swatch, 22, 13);
    pen.fillStyle = paint(pen);
    pen.fillRect(0, 0, 22, 13);
    return item;
  }));
}

// The overviews of timelines with many ranks: a click moves the window of ranks and of time.
function addOverviews() {
  for (const timeline of page.timelines.filter(one => one.overview)) {
    const canvas = document.createElement("canvas");
    canvas.id = `overview-${timeline.index}`;
    $("overviews").append(canvas);
    const go = event => {
      if (!event.buttons) return;
      const box = canvas.getBoundingClientRect(), length = state.to - state.from;
      const rank = ((event.clientY - box.top - 20) / (box.height - 20)) * timeline.ranks;
      const nearest = timeline.rows.findIndex(row => row.rank >= rank - WINDOW / 2);
      state.first = Math.max(0, Math.min(nearest < 0 ? Infinity : nearest, timeline.rows.length - WINDOW));
      const centre = ((event.clientX - box.left - GUTTER.left) / inner) * page.end;
      show(centre - length / 2, centre + length / 2);
    };
    canvas.addEventListener("pointerdown", go);
    canvas.addEventListener("pointermove", go);
  }
}

unpack().then(() => {
  $("by-rank").hidden = page.timelines.length < 2;
  $("critical").hidden = !page.timelines.some(timeline => timeline.rows.some(row => row.critical.size));
  addOverviews();
  listen();
  document.documentElement.dataset.ready = "true";
});
