"use strict";
/* Distributions: which share of requests took no longer than a time; and what a long TTFT went with. */

const MARKS = [0.5, 0.9, 0.99], PAD = { left: 64, right: 16, top: 12, bottom: 44 };

const measuredRows = (columns) => [...columns.sent.values.keys()].filter((row) => textOf(columns, "phase", row) === "measure");

function ascending(rows, value) {
  return Float64Array.from(rows, value).filter((number) => !Number.isNaN(number)).sort();
}

function spreadCharts(place, columns, gaps) {
  const rows = measuredRows(columns).filter((row) => textOf(columns, "status", row) === "ok");
  const parts = DATA.parts.filter(({ name }) => columns[name]);
  const curves = [
    ["Time to first token and its parts, ms", [["ttft", "TTFT", "ink"], ...parts.map(({ name, label }) => [name, label, name])]
      .map(([name, label, hue]) => ({ name, label, hue, values: ascending(rows, (row) => valueOf(columns, name, row)) }))],
    ["End-to-end time, time per output token and gaps between chunks, ms", [
      { name: "e2e", label: "E2E", hue: "decode", values: ascending(rows, (row) => valueOf(columns, "e2e", row)) },
      { name: "tpot", label: "TPOT", hue: "prefill", values: ascending(rows, (row) => valueOf(columns, "tpot", row)) },
      { name: "itl", label: "gaps between chunks", hue: "network", values: gaps.itl.values }]],
  ];
  const pair = element("div", { class: "pair even" });
  place.append(pair);
  for (const [caption, all] of curves) {
    const known = all.filter(({ values }) => values.length && values.at(-1) > 0);
    if (known.length) distribution(pair, caption, known);
  }
}

function distribution(place, caption, curves) {
  const labels = curves.map(({ name, hue, label, values }) => {
    // The summary's own, where they are of the same requests: columns are rounded.
    const [count, ...exact] = DATA.percentiles[name] || [];
    const marks = MARKS.map((share, at) => `p${100 * share} ${ms(count === values.length ? exact[at] : quantile(values, share))}`);
    return [hue, `${label} (${marks.join(", ")})`];
  });
  const whole = figure(place, `${caption}: the share of measured requests that took no longer, of those that succeeded`);
  const low = Math.max(0.1, Math.min(...curves.map(({ values }) => values.find((value) => value > 0) ?? 1)));
  const bounds = curves.flatMap(({ name }) => Object.values(DATA.engine[name] || {}).flat());
  const high = Math.max(...curves.map(({ values }) => values.at(-1)), ...bounds) * 1.1;
  canvas(whole, 300, `${caption}. ${labels.map(([, text]) => text).join("; ")}`, (context, width, height) => {
    const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
    const { across, up } = axes(context, box, { low: Math.min(low, high / 10), high, log: true, text: axisMs },
      { low: 0, high: 1, ticks: 5, text: (value) => `${grouped(100 * value, 0)} %` });
    for (const { name, values, hue } of curves) {
      context.strokeStyle = context.fillStyle = colour(hue);
      context.lineWidth = name === "ttft" ? 2.5 : 1.75;
      drawSteps(context, values, across, up);
      for (const share of MARKS) {
        context.beginPath();
        context.arc(across(quantile(values, share)), up(share), 3, 0, 7);
        context.fill();
      }
      drawEngine(context, DATA.engine[name] || {}, across, up, height);
    }
  });
  whole.append(legend(labels));
  const squares = curves.some(({ name }) => DATA.engine[name]) ? " Squares with whiskers: percentiles by the engine's own histograms, with their 90 % intervals." : "";
  whole.append(element("p", { class: "note" }, `Dots: p50, p90 and p99. What is shorter than the axis stands at its left end.${squares}`));
}

/* At most a step a pixel: with more requests than that, every step stands for several. */
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

function causeCharts(place, columns) {
  const rows = measuredRows(columns).filter((row) => valueOf(columns, "ttft", row) >= 0);
  const pair = element("div", { class: "pair even" });
  place.append(pair);
  const threshold = DATA.threshold;
  const queueing = threshold ? ` Beyond the line, queueing is most of the median TTFT.` : "";
  scatter(pair, `TTFT against the requests waiting in the engine as each was sent.${queueing}`, rows, columns, "waiting", "requests waiting", threshold);
  scatter(pair, "TTFT against input tokens", rows, columns, "input", "input tokens", null);
}

function scatter(place, caption, rows, columns, name, label, line) {
  const known = columns[name] ? rows.filter((row) => valueOf(columns, name, row) >= 0) : [];
  if (!known.length) return;
  const most = (value) => known.reduce((high, row) => Math.max(high, value(row)), 1);
  const right = most((row) => valueOf(columns, name, row)), top = most((row) => valueOf(columns, "ttft", row));
  canvas(figure(place, caption), 300, `${caption} ${cell(known.length)} requests, TTFT up to ${ms(top)} ms, ${label} up to ${cell(right)}.`, (context, width, height) => {
    const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
    const { across, up } = axes(context, box, { low: 0, high: right * 1.03, ticks: Math.min(6, right * 1.03), label }, { low: 0, high: top * 1.05, text: axisMs });
    context.fillStyle = colour("accent");
    context.globalAlpha = Math.max(0.08, Math.min(0.6, 400 / known.length));
    for (const row of known) context.fillRect(across(valueOf(columns, name, row)) - 1.5, up(valueOf(columns, "ttft", row)) - 1.5, 3, 3);
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
