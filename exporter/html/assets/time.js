"use strict";
/* Charts over time, on one axis with one cursor and one zoom: the parts of TTFT, the engine's load, its KV cache. */

const STEP_PX = 4, MOST_STEPS = 240, FEWEST_STEPS = 12, LEAST_VIEW_MS = 1000;
const COUNTS = Array.from({ length: 30 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

function timeCharts(place, run) {
  const kinds = [
    ["TTFT by part: mean of the requests submitted in each step", 240, partRows(run)],
    [`Requests: ${DATA.byClock ? "" : "in flight at the client, "}running and waiting in the engines; the most in each step`, 190, loadRows(run)],
    ["KV cache in use, of the fullest engine; the most in each step", 120, cacheRows(run)],
  ];
  onOneAxis(place, [run], kinds, (u) => drawMarks(u, run));
  place.append(marksLegend(run));
}

/* Charts [caption, height, rows] of runs on one axis, each run from its own start; `run.view` is what part is in sight. */
function onOneAxis(place, runs, kinds, draw) {
  const [first] = runs, charts = [];
  const all = () => [runs.length > 1 ? 0 : Math.min(first.begin || 0, first.columns.sent.values[0] ?? Infinity),
    Math.max(...runs.map(({ duration, columns }) => Math.max(duration, columns.sent.values.at(-1) ?? 0)))];
  const paint = () => {
    const [from, to] = first.view || all();
    const requests = Math.max(...runs.map(({ columns: { sent } }) => placeOf(sent.values, to) - placeOf(sent.values, from)));
    for (const chart of charts) chart.show(from, to, requests, readEvery(runs));
  };
  const show = (from, to) => {
    first.view = viewOf(from, to, ...all());
    paint();
    first.zoomed?.();
  };
  const controls = zoomControls(() => first.view || all(), show);
  place.append(controls);
  for (const [caption, height, rows] of kinds) {
    if (rows.length) charts.push(timeChart(figure(place, caption), height, rows, show, draw));
  }
  paint();
  const fit = () => { for (const chart of charts) chart.fit(); paint(); };
  whenPainted(controls, fit, () => { for (const chart of charts) chart.end(); });
}

/* What is shown of a run where a range is asked for: never less than a second; null for all. */
function viewOf(from, to, begin, end) {
  const wide = Math.min(end - begin, Math.max(to - from, LEAST_VIEW_MS)), spare = Math.max(0, wide - (to - from)) / 2;
  const left = Math.max(begin, Math.min(from - spare, end - wide));
  return wide < end - begin ? [left, left + wide] : null;
}

function zoomControls(view, show) {
  const by = (label, before, behind) => {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      const [from, to] = view();
      show(from + before * (to - from), to + behind * (to - from));
    });
    return button;
  };
  return element("div", { class: "controls", role: "group", "aria-label": "Zoom of the charts over time" },
    by("Zoom in", 0.25, -0.25), by("Zoom out", -0.5, 0.5), by("Earlier", -0.5, -0.5), by("Later", 0.5, 0.5), by(DATA.live ? "All" : "Whole run", -Infinity, Infinity),
    element("span", { class: "note" }, `or drag over a chart; a double click shows ${DATA.live ? "all, and goes on" : "the whole run"}`));
}

/* Rows to draw: a name for the colour, a label, `at(steps)` their values, whether stacked. */
function partRows(run) {
  const mean = (name) => (steps) => meansOf(run, steps)[name];
  const rows = partsOf(run).map(({ name, label }) => ({ name, label, at: mean(name), text: ms, mean: true, stacked: true }));
  rows.push({ name: "rest", label: "TTFT without a breakdown", text: ms, at: mean("uncovered") });
  const { sent } = run.columns, whole = stepsOf(sent.values[0], sent.values.at(-1) + 1, 1);
  return rows.filter(({ at }) => at(whole).some((value) => value));
}

/* Of the requests sent in each step: the mean of TTFT, of its parts, and of the TTFT of those without a breakdown. */
function meansOf(run, steps) {
  const { columns } = run, sent = columns.sent.values;
  if (steps.means?.has(run)) return steps.means.get(run);
  const names = ["ttft", "uncovered", ...partsOf(run).map(({ name }) => name)];
  const sums = names.map(() => new Float64Array(steps.count)), counts = names.map(() => new Float64Array(steps.count));
  const values = names.map((name) => columns[name === "uncovered" ? "ttft" : name].values);
  for (let row = placeOf(sent, steps.from - 1e-9) + 1; row < sent.length && sent[row] < steps.to; row++) {
    const step = Math.floor((sent[row] - steps.from) / steps.each), covered = isCovered(columns, row);
    if (Number.isNaN(values[0][row])) continue;
    for (let at = 0; at < names.length; at++) {
      if (at && covered === (at === 1)) continue;
      sums[at][step] += values[at][row] || 0;
      counts[at][step]++;
    }
  }
  const means = Object.fromEntries(names.map((name, at) => [name, Array.from(sums[at], (sum, step) => (counts[at][step] ? sum / counts[at][step] : null))]));
  (steps.means ??= new Map()).set(run, means);
  return means;
}

const stepsOf = (from, to, count) => ({ from, to, count, each: (to - from) / count });

/* At most so many steps for what is in view, of a round length and from a round time on: one begins as the run does. */
function roundSteps(from, to, most, least) {
  const { step } = ticks(0, Math.max((to - from) / most, least), 1), first = Math.floor(from / step), count = Math.max(1, Math.ceil(to / step) - first);
  return stepsOf(first * step, (first + count) * step, count);
}

function loadRows(run) {
  const ends = ({ columns }) => once(columns, "ends", () => Float64Array.from(columns.sent.values, (at, row) => at + (valueOf(columns, "e2e", row) || valueOf(columns, "ended", row)))
    .filter((at) => at === at).sort());
  const open = (at) => placeOf(run.columns.sent.values, at) - placeOf(ends(run), at);
  const add = (gauge, name) => gaugeRows(run, gauge, name, gauge, cell, (a, b) => a + b);
  // While a run goes, columns lack what is in flight.
  const rows = run.live ? add("in flight", "ink") : [{ name: "ink", label: "in flight", text: cell, at: (steps) => highest(steps, run.columns.sent.values, open, open) }];
  for (const [gauge, name] of [["running", "decode"], ["waiting", "queue"]]) rows.push(...add(gauge, name));
  return rows;
}

const cacheRows = (run) => gaugeRows(run, "KV cache in use", "ink", "KV cache in use",
  (value) => (Number.isFinite(value) ? `${grouped(100 * value, 1)} %` : "-"), Math.max);

/* One row of a gauge, of all engines together; none where no engine has it. */
function gaugeRows(run, gauge, name, label, text, fold) {
  const held = () => run.gauges.filter((read) => read.label === gauge);
  const at = (steps) => highest(steps, timesOf(held()), (time) => combined(held(), time, fold));
  return held().length ? [{ name, label, text, at }] : [];
}

const timesOf = (held) => Float64Array.from(held.flatMap(({ times }) => Array.from(times))).sort();

/* How far apart gauges are read: in shorter steps an earlier reading would stand beside what is counted now. */
const readEvery = (runs) => Math.max(0, ...runs.flatMap(({ gauges }) => gauges.map(({ times }) => (times.at(-1) - times[0]) / (times.length - 1) || 0)));

/* The most in each step: a peak between the ends of two steps is seen too, and what is counted, not read, at their begin. */
function highest(steps, times, value, counted = () => null) {
  return Array.from({ length: steps.count }, (_, step) => {
    const to = steps.from + (step + 1) * steps.each;
    let most = Math.max(value(to) ?? -Infinity, counted(to - steps.each) ?? -Infinity);
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

/* The right edge, where its value stands, of the step that the cursor is in. */
const stepAt = ({ data: [edges] }, series, near, at) => Math.max(1, Math.min(edges.length - 1, placeOf(edges, at) + 1));

/* One chart of uPlot. Stacked rows are drawn as sums, the whole first, so that each covers what is not its own. */
function timeChart(place, height, rows, show, draw) {
  const stacked = rows.filter((row) => row.stacked);
  const order = [...[...stacked].reverse(), ...rows.filter((row) => !row.stacked)];
  const grid = { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line") } };
  const width = () => Math.max(200, place.clientWidth);
  let shown = {}, isEmpty = false, top = 1, step = 1;
  const said = (row, value) => (row.text === ms ? axisMs(value, step, 100) : row.text(value));
  const chart = new uPlot({
    width: width(), height,
    legend: { markers: { width: 2, stroke: (_, at) => `var(--${order[at - 1].name})`, dash: (_, at) => (order[at - 1].dash ? "dashed" : "solid"),
      fill: (_, at) => (order[at - 1].stacked ? `var(--${order[at - 1].name})` : "transparent") } },
    scales: { x: { time: false }, y: { range: () => [0, top * 1.05] } },
    cursor: { sync: { key: "time" }, points: { show: false }, dataIdx: stepAt, drag: { x: true, y: false, setScale: false } },
    axes: [
      { ...grid, size: 34, space: 90, values: (_, values) => values.map((value) => moment(value, values[1] - values[0] || 1)), ...(DATA.byClock && { incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300] }) },
      { ...grid, size: 70, space: height > 150 ? 26 : 16, ...(rows[0].text === cell && { incrs: COUNTS }),
        values: (_, values) => ((step = values[1] - values[0] || 1), values.map((value) => (isEmpty ? "" : rows[0].text === ms ? axisMs(value, step) : rows[0].text(value)))) },
    ],
    series: [{ value: (u, _, series, edge) => (edge ? `${between(u.data[0][edge - 1], u.data[0][edge], u.data[0][edge] - u.data[0][edge - 1])} ${DATA.byClock ? "UTC" : "after the start"}` : "") }, ...order.map((row) => ({
      label: row.label, stroke: () => colour(row.name), width: row.stacked ? 0.5 : 1.75, dash: row.dash,
      fill: row.stacked ? () => colour(row.name) : undefined, points: { show: false },
      paths: row.stacked ? uPlot.paths.bars({ size: [1], align: -1 }) : uPlot.paths.stepped({ align: -1 }),
      value: (_, value, series, edge) => (edge ? said(row, shown[row.label][edge - 1]) : ""),
    }))],
    hooks: {
      setSelect: [(u) => {
        if (u.select.width > 3) show(1000 * u.posToVal(u.select.left, "x"), 1000 * u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      draw: draw ? [draw] : [],
      ready: [(u) => u.over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); show(-Infinity, Infinity); }, true)],
    },
  }, [[], ...order.map(() => [])], place);
  const drawing = chart.root.querySelector("canvas"), caption = place.firstChild.textContent;
  drawing.setAttribute("role", "img");
  // Parts stand in their own order, as in other legends.
  const [range, ...lines] = chart.root.querySelectorAll(".u-series");
  range.firstChild.remove(); // its heading is empty
  range.parentNode.addEventListener("click", (event) => event.stopImmediatePropagation(), true);
  for (const [at, line] of lines.entries()) line.title = titleOf(order[at].label);
  range.parentNode.append(...lines.slice(0, stacked.length).reverse(), ...lines.slice(stacked.length), range);
  return {
    end: () => chart.destroy(), // it listens to the window
    fit: () => chart.setSize({ width: width(), height }),
    show: (from, to, requests, every) => {
      const steps = rows[0].mean ? roundSteps(from, to, stepCount(place.clientWidth, Math.max(FEWEST_STEPS, requests / 3)), 0)
        : roundSteps(from, to, stepCount(place.clientWidth, Infinity), 0.9 * every);
      shown = Object.fromEntries(rows.map((row) => [row.label, row.at(steps)]));
      isEmpty = rows.every((row) => shown[row.label].every((value) => value === null));
      place.firstChild.textContent = isEmpty ? `${caption}: ${rows[0].mean ? (requests ? "no TTFT" : "no requests") : "not known"} here` : caption;
      const most = rows.map((row) => `${row.label} up to ${said(row, shown[row.label].reduce((high, value) => Math.max(high, value), 0))}`);
      drawing.setAttribute("aria-label", `${caption}, ${between(from / 1000, to / 1000)}: ${most.join(", ")}.${DATA.live ? "" : " The table below has the numbers."}`);
      const sums = new Float64Array(steps.count);
      const tops = new Map(stacked.map((row) => [row.label, shown[row.label].map((value, step) => (value === null ? null : (sums[step] += Math.max(0, value))))]));
      // A step's value stands at its right edge; the first edge has none of its own.
      const edges = Array.from({ length: steps.count + 1 }, (_, edge) => (steps.from + edge * steps.each) / 1000);
      const drawn = order.map((row) => tops.get(row.label) || shown[row.label]);
      top = Math.max(...drawn.flat()) || 1;
      chart.setData([edges, ...drawn.map((values, at) => [order[at].stacked ? null : values[0], ...values])], false);
      chart.setScale("x", { min: from / 1000, max: to / 1000 });
    },
  };
}

/* A place on the axis: seconds after the start; of a watch, which may go on for days, the time of day. */
const moment = (seconds, apart = 1) => (DATA.byClock ? new Date(Date.parse(DATA.startsAt) + 1000 * seconds).toISOString().slice(11, 19) : `${grouped(seconds, digitsOf(apart))} s`);

/* A range of the axis, in digits that fit its length. */
const between = (from, to, apart = 10 ** Math.min(0, Math.floor(Math.log10(to - from)) - 1)) => `${moment(from, apart)} to ${moment(to, apart)}`;

/* As many steps as the width has room for; of few requests fewer, so that most steps have one. */
const stepCount = (width, most) => Math.max(1, Math.min(MOST_STEPS, width / STEP_PX, most));

/* What happened to the engines, and when requests were sent that did not succeed. */
const marksOf = ({ columns, marks }) => once(columns, "marks", () =>
  [...marks, ...Array.from(columns.sent.values.filter((_, row) => isFailed(columns, row)), (at) => ({ at, kind: "request" }))]);

/* Phases other than the measured one are shaded; restarts are lines, failed scrapes and requests are ticks. */
function drawMarks(u, run) {
  const { ctx: context, bbox: box } = u;
  const at = (value) => Math.min(box.left + box.width, Math.max(box.left, u.valToPos(value / 1000, "x", true)));
  context.save();
  context.globalAlpha = 0.12;
  context.fillStyle = colour("ink");
  for (const [name, begin, end] of run.phases) {
    if (name !== "measure") context.fillRect(at(begin), box.top, at(end ?? run.duration) - at(begin), box.height);
  }
  context.globalAlpha = 1;
  let last = null;
  for (const { at: time, kind } of marksOf(run)) {
    const left = Math.round(u.valToPos(time / 1000, "x", true));
    if (left < box.left || left > box.left + box.width || (last && last.left === left && last.kind === kind)) continue;
    last = { left, kind };
    context.fillStyle = colour(kind === "scrape" ? "warning" : "alarm");
    const tall = kind === "restart" ? box.height : 8 * devicePixelRatio, wide = (kind === "request" ? 3 : 1) * devicePixelRatio;
    context.fillRect(left - wide / 2, kind === "request" ? box.top : box.top + box.height - tall, wide, tall);
  }
  context.restore();
}

function marksLegend(run) {
  const kinds = new Set(marksOf(run).map(({ kind }) => kind));
  const entries = [];
  if (run.phases.some(([name]) => name !== "measure")) entries.push(["line", "shaded: not measured (warm-up)"]);
  if (kinds.has("restart")) entries.push(["alarm", "full line: an engine restarted"]);
  if (kinds.has("scrape")) entries.push(["warning", "tick at the bottom: a scrape failed"]);
  if (kinds.has("request")) entries.push(["alarm", "block at the top: a request sent then did not succeed"]);
  return legend(entries);
}
