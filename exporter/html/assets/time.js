"use strict";
/* Charts over time, on one axis with one cursor and one zoom: the parts of TTFT, the engine's load, its KV cache. */

const STEP_PX = 7, MOST_STEPS = 240, FEWEST_STEPS = 12;

function timeCharts(place, columns, gauges) {
  const all = [Math.min(0, columns.sent.values[0] ?? 0), Math.max(DATA.duration, columns.sent.values.at(-1) ?? 0)];
  const view = { from: all[0], to: all[1] };
  const charts = [];
  const sent = columns.sent.values;
  const marks = [...DATA.marks, ...Array.from(sent.filter((_, row) => isFailed(columns, row)), (at) => ({ at, kind: "request" }))];
  const visible = ({ from, to }) => placeOf(sent, to) - placeOf(sent, from);
  const show = (from, to) => {
    view.from = Math.max(all[0], Math.min(from, all[1]));
    view.to = Math.min(all[1], Math.max(to, view.from + 1));
    for (const chart of charts) chart.show();
  };
  place.append(zoomControls(view, show));
  const add = (caption, height, rows) => {
    if (rows.length) charts.push(timeChart(figure(place, caption), height, rows, view, visible, marks, show, () => show(...all)));
  };
  add("TTFT by part: mean of the requests submitted in each step", 240, partRows(columns));
  add("Requests: in flight at the client, running and waiting in the engines; the most in each step", 190, loadRows(columns, gauges));
  add("KV cache in use, of the fullest engine; the most in each step", 120, cacheRows(gauges));
  place.append(marksLegend(marks));
  show(...all);
  DRAWN.push(() => { for (const chart of charts) chart.fit(); show(view.from, view.to); });
}

function zoomControls(view, show) {
  const by = (label, from, to) => {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      const span = view.to - view.from;
      show(view.from + from * span, view.to + to * span);
    });
    return button;
  };
  return element("div", { class: "controls", role: "group", "aria-label": "Zoom of the charts over time" },
    by("Zoom in", 0.25, -0.25), by("Zoom out", -0.5, 0.5), by("Earlier", -0.5, -0.5), by("Later", 0.5, 0.5), by("Whole run", -Infinity, Infinity),
    element("span", { class: "note" }, "or drag over a chart; a double click shows the whole run"));
}

/* Rows to draw: a name for the colour, a label, `at(steps)` giving the value of each step, and whether it is stacked. */
function partRows(columns) {
  const parts = DATA.parts.filter(({ name }) => columns[name]);
  const sumsOf = (steps) => {
    if (steps.parts) return steps.parts;
    const sums = { count: new Float64Array(steps.count), uncovered: new Float64Array(steps.count), whole: new Float64Array(steps.count) };
    for (const { name } of parts) sums[name] = new Float64Array(steps.count);
    const sent = columns.sent.values;
    for (let row = placeOf(sent, steps.from - 1e-9) + 1; row < sent.length && sent[row] < steps.to; row++) {
      const ttft = valueOf(columns, "ttft", row);
      if (Number.isNaN(ttft)) continue;
      const step = Math.floor((sent[row] - steps.from) / steps.each);
      if (!isCovered(columns, row)) { sums.uncovered[step]++; sums.whole[step] += ttft; continue; }
      sums.count[step]++;
      for (const { name } of parts) sums[name][step] += valueOf(columns, name, row) || 0;
    }
    return (steps.parts = sums);
  };
  const mean = (name) => (steps) => Array.from(sumsOf(steps)[name], (sum, step) => (steps.parts.count[step] ? sum / steps.parts.count[step] : null));
  const rows = parts.map(({ name, label }) => ({ name, label, at: mean(name), text: ms, stacked: true }));
  rows.push({ name: "rest", label: "TTFT without a breakdown", text: ms,
    at: (steps) => Array.from(sumsOf(steps).whole, (sum, step) => (steps.parts.uncovered[step] ? sum / steps.parts.uncovered[step] : null)) });
  const whole = stepsOf(columns.sent.values[0], columns.sent.values.at(-1) + 1, 1);
  return rows.filter(({ at }) => at(whole).some((value) => value));
}

const stepsOf = (from, to, count) => ({ from, to, count, each: (to - from) / count });

function loadRows(columns, gauges) {
  const rows = [];
  const begins = columns.sent.values;
  const ends = Float64Array.from(columns.sent.values, (value, row) => value + valueOf(columns, "e2e", row)).filter((value) => value === value).sort();
  const open = (at) => placeOf(begins, at) - placeOf(ends, at);
  rows.push({ name: "network", label: "in flight", text: cell, at: (steps) => highest(steps, begins, open) });
  for (const [gauge, name] of [["running", "prefill"], ["waiting", "queue"]]) {
    const held = gauges.filter(({ label }) => label === gauge);
    if (held.length) rows.push({ name, label: gauge, text: cell, at: (steps) => highest(steps, timesOf(held), (at) => combined(held, at, (a, b) => a + b)) });
  }
  return rows;
}

function cacheRows(gauges) {
  const held = gauges.filter(({ name }) => name === "kv_cache_usage");
  if (!held.length) return [];
  return [{ name: "decode", label: "KV cache in use", text: (value) => (Number.isFinite(value) ? `${grouped(100 * value, 1)} %` : "-"),
    at: (steps) => highest(steps, timesOf(held), (at) => combined(held, at, Math.max)) }];
}

const timesOf = (held) => Float64Array.from(held.flatMap(({ times }) => Array.from(times))).sort();

/* The most in each step: a peak between the ends of two steps is seen too. */
function highest(steps, times, value) {
  return Array.from({ length: steps.count }, (_, step) => {
    const to = steps.from + (step + 1) * steps.each;
    let most = value(to) ?? -Infinity;
    for (let at = placeOf(times, to - steps.each) + 1; times[at] <= to; at++) most = Math.max(most, value(times[at]) ?? -Infinity);
    return most === -Infinity ? null : most;
  });
}

/* A gauge stands until it is read again; before the first and after the last reading it is not known. */
function combined(held, at, fold) {
  let whole = null;
  for (const { times, values } of held) {
    const place = placeOf(times, at);
    if (place < 0 || at > times.at(-1) + 1000 || Number.isNaN(values[place])) return null;
    whole = whole === null ? values[place] : fold(whole, values[place]);
  }
  return whole;
}

/* One chart of uPlot. Stacked rows are drawn as sums, the whole first, so that each covers what is not its own. */
function timeChart(place, height, rows, view, visible, marks, show, reset) {
  const stacked = rows.filter((row) => row.stacked);
  const order = [...[...stacked].reverse(), ...rows.filter((row) => !row.stacked)];
  let shown = {};
  const chart = new uPlot({
    width: Math.max(200, place.clientWidth), height, legend: { markers: { stroke: (_, at) => `var(--${order[at - 1].name})`, fill: (_, at) => (order[at - 1].stacked ? `var(--${order[at - 1].name})` : "transparent") } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, (high || 1) * 1.05] } },
    cursor: { sync: { key: "time" }, drag: { x: true, y: false, setScale: false } },
    axes: [
      { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line") },
        values: (_, values) => values.map((value) => `${cell(value)} s`) },
      { stroke: () => colour("faint"), size: 70, grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line") },
        values: (_, values) => values.map((value) => (rows[0].text === ms ? axisMs(value, values[1] - values[0] || 1) : rows[0].text(value))) },
    ],
    series: [{ label: "after the start", value: (_, value) => (value === null ? "-" : `${cell(value)} s`) }, ...order.map((row) => ({
      label: row.label, stroke: () => colour(row.name), width: row.stacked ? 0.5 : 1.75,
      fill: row.stacked ? () => colour(row.name) : undefined, points: { show: false },
      paths: row.stacked ? uPlot.paths.bars({ size: [1], align: -1 }) : uPlot.paths.stepped({ align: -1 }),
      value: (_, value, series, edge) => (edge ? row.text(shown[row.label][edge - 1]) : "-"),
    }))],
    hooks: {
      setSelect: [(u) => {
        if (u.select.width > 3) show(1000 * u.posToVal(u.select.left, "x"), 1000 * u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      draw: [(u) => drawMarks(u, marks)],
      ready: [(u) => u.over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); reset(); }, true)],
    },
  }, [[], ...order.map(() => [])], place);
  const drawing = chart.root.querySelector("canvas"), caption = place.firstChild.textContent;
  drawing.setAttribute("role", "img");
  return {
    fit: () => chart.setSize({ width: Math.max(200, place.clientWidth), height }),
    show: () => {
      const count = stepCount(place.clientWidth, stacked.length ? Math.ceil(visible(view) / 3) : Infinity);
      const steps = stepsOf(view.from, view.to, count);
      shown = Object.fromEntries(rows.map((row) => [row.label, row.at(steps)]));
      const most = rows.map((row) => `${row.label} up to ${row.text(shown[row.label].reduce((high, value) => Math.max(high, value), 0))}`);
      drawing.setAttribute("aria-label", `${caption}, from ${cell(view.from / 1000)} to ${cell(view.to / 1000)} s: ${most.join(", ")}. The table below has the numbers.`);
      const sums = new Float64Array(count);
      const tops = new Map(stacked.map((row) => [row.label, shown[row.label].map((value, step) => (value === null ? null : (sums[step] += Math.max(0, value))))]));
      // A step's value stands at its right edge; the first edge has none of its own.
      const edges = Array.from({ length: count + 1 }, (_, edge) => (steps.from + edge * steps.each) / 1000);
      const drawn = order.map((row) => tops.get(row.label) || shown[row.label]);
      chart.setData([edges, ...drawn.map((values) => [values[0], ...values])], false);
      chart.setScale("x", { min: view.from / 1000, max: view.to / 1000 });
    },
  };
}

/* As many steps as the width has room for; of few requests fewer, so that most steps have one. */
function stepCount(width, requests) {
  const most = Math.min(MOST_STEPS, Math.floor(width / STEP_PX));
  return Math.max(1, Math.min(most, Math.max(FEWEST_STEPS, requests)));
}

/* Phases other than the measured one are shaded; restarts are lines, failed scrapes and requests are ticks. */
function drawMarks(u, marks) {
  const { ctx: context, bbox: box } = u;
  const at = (value) => Math.min(box.left + box.width, Math.max(box.left, u.valToPos(value / 1000, "x", true)));
  context.save();
  context.globalAlpha = 0.12;
  context.fillStyle = colour("ink");
  for (const [name, begin, end] of DATA.phases) {
    if (name !== "measure") context.fillRect(at(begin), box.top, at(end ?? DATA.duration) - at(begin), box.height);
  }
  context.globalAlpha = 1;
  let last = null;
  for (const { at: moment, kind } of marks) {
    const left = Math.round(u.valToPos(moment / 1000, "x", true));
    if (left < box.left || left > box.left + box.width || (last && last.left === left && last.kind === kind)) continue;
    last = { left, kind };
    context.fillStyle = colour(kind === "scrape" ? "warning" : "alarm");
    const tall = kind === "restart" ? box.height : 8 * devicePixelRatio, wide = (kind === "request" ? 3 : 1) * devicePixelRatio;
    context.fillRect(left - wide / 2, kind === "request" ? box.top : box.top + box.height - tall, wide, tall);
  }
  context.restore();
}

function marksLegend(marks) {
  const kinds = new Set(marks.map(({ kind }) => kind));
  const entries = [];
  if (DATA.phases.some(([name]) => name !== "measure")) entries.push(["line", "shaded: not measured (warm-up)"]);
  if (kinds.has("restart")) entries.push(["alarm", "full line: an engine restarted"]);
  if (kinds.has("scrape")) entries.push(["warning", "tick at the bottom: a scrape failed"]);
  if (kinds.has("request")) entries.push(["alarm", "block at the top: a request sent then did not succeed"]);
  return legend(entries);
}
