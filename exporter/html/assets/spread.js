"use strict";
/* Distributions: which share of requests took no longer than a time; and what a long TTFT went with. */

const MARKS = [0.5, 0.9, 0.99], PAD = { left: 64, right: 16, top: 12, bottom: 44 };

/* The rows, of those given, in which a column of texts says so. */
function rowsWith({ values, texts }, text, rows = values.keys()) {
  const code = texts.indexOf(text), kept = [];
  for (const row of rows) if (values[row] === code) kept.push(row);
  return kept;
}

const measuredRows = ({ columns }) => once(columns, "measured", () => rowsWith(columns.phase, "measure"));

function ascending(rows, value) {
  const known = new Float64Array(rows.length);
  let count = 0;
  for (const row of rows) if (!Number.isNaN((known[count] = value(row)))) count++;
  return known.subarray(0, count).sort();
}

/* The values of a column, ascending, of the measured requests that succeeded. */
function valuesOf(run, name) {
  const { columns } = run;
  if (name === "itl") return run.gaps.itl.values;
  const rows = once(columns, "succeeded", () => rowsWith(columns.status, "ok", measuredRows(run)));
  return once(columns, `ascending ${name}`, () => ascending(rows, (row) => valueOf(columns, name, row)));
}

function spreadCharts(place, run) {
  const parts = partsOf(run).map(({ name, label }) => ({ run, name, label, hue: name }));
  const pair = element("div", { class: "pair even" });
  place.append(pair);
  distribution(pair, "Time to first token and its parts, ms", [{ run, name: "ttft", label: "TTFT", hue: "ink", width: 2.5 }, ...parts]);
  distribution(pair, `End-to-end time, time per output token${run.live ? "" : " and gaps between chunks"}, ms`, [
    { run, name: "e2e", label: "E2E", hue: "ink", width: 2.5 }, { run, name: "tpot", label: "TPOT", hue: "decode" },
    { run, name: "itl", label: "gaps between chunks", hue: "decode", dash: [2, 3] }]);
  marksNote(place, [run]);
}

/* What the marks of the charts mean. */
function marksNote(place, runs) {
  const squares = runs.some(({ engine }) => Object.keys(engine).length) ? " Squares: percentiles by the engine's own histograms, with their 90 % intervals." : "";
  const intervals = runs.some(({ percentiles }) => Object.keys(percentiles).length) ? " with their 95 % intervals; an arrow: too few requests to say how high" : "";
  place.append(element("p", { class: "note" }, `Dots: p50, p90 and p99${intervals}. What is shorter than the axis stands at its left end.${squares}`));
}

/* One chart of how values are spread; a curve is of a `name` of a run, with its label, colour, width and dashes. */
function distribution(place, caption, all) {
  const curves = all.filter(({ run, name }) => valuesOf(run, name).at(-1) > 0);
  if (!curves.length) return;
  const engineOf = ({ run, name }) => run.engine[name] || {};
  const whole = figure(place, `${caption}: the share of measured requests that took no longer, of those that succeeded`);
  const words = element("div");
  const view = canvas(whole, 300, "", (context, width, height) => {
    const shown = curves.map((curve) => ({ ...curve, values: valuesOf(curve.run, curve.name) })).filter(({ values }) => values.length);
    const texts = shown.map((curve) => `${curve.label}: ${percentilesOf(curve).map(markText).join("; ")}`);
    view.element.setAttribute("aria-label", `${caption}. ${texts.join(". ")}`);
    words.replaceChildren(legend(shown.map((curve) => [curve.hue, `${curve.label} (${percentilesOf(curve).map(([share, at]) => `p${100 * share} ${ms(at)}`).join(", ")})`, curve.dash])));
    const low = Math.max(0.1, Math.min(...shown.map(({ values }) => values.find((value) => value > 0) ?? 1)));
    const high = Math.max(...shown.map(({ values }) => values.at(-1)), ...shown.flatMap((curve) => Object.values(engineOf(curve)).flat())) * 1.1;
    const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
    const { across, up } = axes(context, box, { low: Math.min(low, high / 10), high, log: true, text: cell },
      { low: 0, high: 1.05, ticks: 5, text: (value) => `${grouped(100 * value, 0)} %` });
    for (const curve of shown) {
      context.strokeStyle = colour(curve.hue);
      context.lineWidth = curve.width || 1.75;
      context.setLineDash(curve.dash || []);
      drawSteps(context, curve.values, across, up);
    }
    context.setLineDash([]);
    for (const [order, curve] of shown.entries()) {
      context.fillStyle = colour(curve.hue);
      // Bars beside each other, since those of several curves meet.
      const aside = 3 * (order - (shown.length - 1) / 2);
      for (const [share, at, low, high] of percentilesOf(curve)) drawMark(context, across, up(share), aside, at, low, high, curve.width ? 5 : 3);
      drawEngine(context, engineOf(curve), across, up);
    }
  });
  whole.append(words);
}

/* Percentiles [share, value, low, high, needed] of a curve: the summary's own, where they are of the same requests. */
function percentilesOf({ run, name, values }) {
  const own = run.percentiles[name];
  return MARKS.map((share) => [share, ...(own && (own.count ?? values.length) === values.length ? own[`p${100 * share}`] : [quantile(values, share)])]);
}

function markText([share, at, low, high, needed]) {
  const interval = low === undefined || low === null ? "" : high === null ? `, at least ${ms(low)}; an interval needs about ${cell(needed)}` : `, 95 % interval ${ms(low)} to ${ms(high)}`;
  return `p${100 * share} ${ms(at)}${interval}`;
}

/* A percentile as a dot, its interval as a bar with ends; a bound has one end and an arrow. */
function drawMark(context, across, y, aside, at, low, high, radius) {
  context.beginPath();
  context.arc(across(at), y, radius, 0, 7);
  context.fill();
  if (low === undefined || low === null) return;
  const left = across(low), right = high === null ? across(at) + 12 : across(high), level = y + aside;
  context.fillRect(left, level - 0.5, right - left, 1);
  for (const end of high === null ? [left] : [left, right]) context.fillRect(end - 0.75, level - 3, 1.5, 6);
  context.beginPath();
  if (high === null) context.moveTo(right, level - 3), context.lineTo(right + 4, level), context.lineTo(right, level + 3);
  context.fill();
}

/* At most a step a pixel: of more requests, every step stands for several. */
function drawSteps(context, values, across, up) {
  const every = Math.max(1, Math.floor(values.length / 2000));
  context.beginPath();
  context.moveTo(across(values[0]), up(0));
  for (let at = 0; at < values.length; at += every) {
    const share = Math.min(1, (at + every) / values.length);
    context.lineTo(across(values[at]), up(at / values.length));
    context.lineTo(across(values[at]), up(share));
  }
  context.lineTo(across(values.at(-1)), up(1));
  context.stroke();
}

function drawEngine(context, percentiles, across, up) {
  for (const [label, [value, low, high]] of Object.entries(percentiles)) {
    const y = up(Number(label.slice(1)) / 100);
    context.fillRect(across(value) - 3, y - 3, 6, 6);
    if (low === null || high === null) continue;
    context.fillRect(across(low), y - 0.6, across(high) - across(low), 1.2);
  }
}

/* As the summary has it: linear between the two nearest (numpy's default). */
function quantile(values, share) {
  const at = share * (values.length - 1), low = Math.floor(at);
  return values[low] + (at - low) * ((values[low + 1] ?? values[low]) - values[low]);
}

function causeCharts(place, run) {
  const pair = element("div", { class: "pair even" });
  place.append(pair);
  const queueing = run.threshold ? ` Beyond the line, queueing is most of the median TTFT.` : "";
  scatter(pair, `TTFT against requests waiting at the scrape before each was sent.${queueing}`, run, "waiting", "requests waiting", run.threshold);
  scatter(pair, "TTFT against input tokens", run, "input", "input tokens", null);
}

function scatter(place, caption, run, name, label, line) {
  const known = () => once(run.columns, `known ${name}`, () => measuredRows(run).filter((row) => valueOf(run.columns, "ttft", row) >= 0 && valueOf(run.columns, name, row) >= 0));
  if (!known().length) return;
  const view = canvas(figure(place, caption), 300, "", (context, width, height) => {
    const { columns } = run, rows = known();
    const most = (value) => rows.reduce((high, row) => Math.max(high, value(row)), 1);
    const right = most((row) => valueOf(columns, name, row)), top = most((row) => valueOf(columns, "ttft", row));
    view.element.setAttribute("aria-label", `${caption} ${cell(rows.length)} requests, TTFT up to ${ms(top)} ms, ${label} up to ${cell(right)}.`);
    const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
    const { across, up } = axes(context, box, { low: 0, high: right * 1.03, ticks: Math.min(6, right * 1.03), label }, { low: 0, high: top * 1.05, text: axisMs });
    context.fillStyle = colour("accent");
    const dots = new Map(); // how many at a place, in steps of 2 px: one alone is seen beside thousands
    for (const row of rows) {
      const place = 65536 * Math.round(across(valueOf(columns, name, row)) / 2) + Math.round(up(valueOf(columns, "ttft", row)) / 2);
      dots.set(place, (dots.get(place) || 0) + 1);
    }
    const densest = Math.log(Math.max(2, ...dots.values()));
    for (const [place, count] of dots) {
      context.globalAlpha = 0.55 + (0.45 * Math.log(count)) / densest;
      context.fillRect(2 * Math.floor(place / 65536) - 1.5, 2 * (place % 65536) - 1.5, 3, 3);
    }
    context.globalAlpha = 1;
    if (line === null || line === undefined) return;
    context.strokeStyle = colour("alarm");
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(across(line - 0.5), box.top);
    context.lineTo(across(line - 0.5), box.bottom);
    context.stroke();
    context.setLineDash([]);
  });
}
