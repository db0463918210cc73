"use strict";
/* The plots of a study: lines, steps, marks and stacked layers with their 95 % intervals, on linear or logarithmic axes. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const MANY = 40; // points of a line that are too many for a mark each

/* What a plot draws of each line: its points, in a stack from left to right on those below, its colour and its dashes. */
function curvesOf({ kind, lines }) {
  const below = new Map();
  return lines.map((line, at) => {
    const points = line.x.map((x, i) => {
      const base = kind === "stack" ? below.get(x) || 0 : 0;
      const lift = (value) => (value === null || value === undefined ? null : base + value);
      if (kind === "stack") below.set(x, lift(line.y[i]) ?? base);
      return { x, y: lift(line.y[i]), low: lift(line.low[i]), high: lift(line.high[i]), base, value: line.y[i] };
    });
    if (kind === "stack") points.sort((a, b) => a.x - b.x);
    const part = /^[a-z]+$/.test(line.name) && colour(line.name) ? line.name : null;
    const dash = kind === "line" || kind === "steps" ? DASHES[at % DASHES.length] : undefined;
    return { name: line.name, points, hue: part ?? HUES[at % HUES.length], dash };
  });
}

/* From where to where an axis goes, so that all values are on it; a logarithmic one leaves out what is not above 0. */
function span(values, log, fromZero) {
  const known = values.filter((value) => value !== null && Number.isFinite(value) && (!log || value > 0));
  if (!known.length) return { low: log ? 1 : 0, high: log ? 10 : 1, log };
  let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  if (log) return { low: low / 1.1, high: Math.max(high * 1.1, low * 1.3), log };
  if (fromZero && low > 0) low = 0;
  const room = 0.05 * (high - low || Math.abs(high) || 1);
  return { low: low === 0 ? 0 : low - room, high: high + room, log };
}

/* Return how a place along the axis becomes a pixel. */
function drawPlot(context, box, plot, curves) {
  const all = curves.flatMap(({ points }) => points);
  const places = all.map((point) => point.x), whole = places.every(Number.isInteger);
  const x = { ...span(places, plot.log_x, plot.kind !== "marks"), label: plot.x_title };
  if (whole) x.ticks = Math.min(6, x.high - x.low);
  const y = span(all.flatMap(({ y, low, high }) => [y, low, high]), plot.log_y, true);
  const { across, up } = axes(context, box, x, y);
  context.textAlign = "left";
  context.fillText(plot.y_title, 4, box.top - 4);
  for (const curve of plot.kind === "stack" ? [...curves].reverse() : curves) {
    context.strokeStyle = context.fillStyle = colour(curve.hue);
    context.lineWidth = 1.75;
    context.setLineDash(curve.dash || []);
    if (plot.kind === "stack") fillLayer(context, curve.points, across, up);
    else if (plot.kind !== "marks") strokeLine(context, curve.points, across, up, plot.kind === "steps");
    context.setLineDash([]);
  }
  for (const [order, curve] of curves.entries()) {
    context.fillStyle = colour(plot.kind === "stack" ? "ink" : curve.hue);
    // Intervals of several lines beside each other, since those at one place meet.
    drawIntervals(context, curve.points, across, up, plot.kind === "stack" ? 0 : 3 * (order - (curves.length - 1) / 2));
    if (plot.kind === "marks" || (plot.kind === "line" && curve.points.length <= MANY)) drawDots(context, curve.points, across, up, order % 2);
  }
  return across;
}

const isShown = (point) => point.y !== null;

function strokeLine(context, points, across, up, stepped) {
  context.beginPath();
  let last = null;
  for (const point of points) {
    if (!isShown(point)) { last = null; continue; }
    if (last && stepped) context.lineTo(across(point.x), up(last.y));
    if (last) context.lineTo(across(point.x), up(point.y)); else context.moveTo(across(point.x), up(point.y));
    last = point;
  }
  context.stroke();
}

function fillLayer(context, points, across, up) {
  const known = points.filter(isShown);
  context.beginPath();
  for (const { x, y } of known) context.lineTo(across(x), up(y));
  for (const { x, base } of known.reverse()) context.lineTo(across(x), up(base));
  context.globalAlpha = 0.8;
  context.fill();
  context.globalAlpha = 1;
}

/* Filled, or rings, so that two lines are told apart without colours. */
function drawDots(context, points, across, up, hollow) {
  context.strokeStyle = context.fillStyle;
  for (const { x, y } of points.filter(isShown)) {
    context.beginPath();
    context.arc(across(x), up(y), 3.5, 0, 7);
    if (hollow) context.stroke(); else context.fill();
  }
}

/* A bar with two ends, or one end and an arrow, where no upper end is known. */
function drawIntervals(context, points, across, up, aside) {
  for (const { x, y, low, high } of points) {
    if (low === null || (y === null && high === null)) continue;
    const at = across(x) + aside, bottom = up(low), top = high === null ? Math.min(bottom, up(y)) - 12 : up(high);
    context.fillRect(at - 0.5, top, 1, bottom - top);
    for (const end of high === null ? [bottom] : [bottom, top]) context.fillRect(at - 3, end - 0.75, 6, 1.5);
    if (high !== null) continue;
    context.beginPath();
    context.moveTo(at - 3, top), context.lineTo(at, top - 5), context.lineTo(at + 3, top);
    context.fill();
  }
}

/* A point of a line in words, as the line below a plot has what is under the cursor. */
function textOfPoint({ name }, { value, low, high, y }) {
  const end = (at) => short(at - y + value);
  const interval = low === null ? "" : high === null ? ` (${end(low)} or more)` : ` (${end(low)} to ${end(high)})`;
  return `${name} ${value === null ? "not known" : short(value)}${interval}`;
}

const short = (value) => (Math.abs(value) >= 1000 ? grouped(value, 0) : String(Number(value.toPrecision(3))));

function studyPlot(place, plot) {
  const curves = curvesOf(plot);
  const hasIntervals = curves.some(({ points }) => points.some(({ low }) => low !== null));
  const whole = figure(place, `${plot.title}${hasIntervals ? `; bars: ${plot.level || "95 %"} intervals, an arrow: no upper end is known` : ""}`);
  let toX = null;
  const view = canvas(whole, 320, `${plot.title}. ${plot.y_title} by ${plot.x_title}: ${curves.map(({ name }) => name).join(", ")}. The tables below have the numbers.`, (context, width, height) => {
    toX = drawPlot(context, { left: 64, right: width - 16, top: 24, bottom: height - 44 }, plot, curves);
  });
  const reading = element("p", { class: "note" }, "\u00a0");
  if (curves.length > 1) whole.append(legend(curves.map(({ hue, name, dash, points }) => [hue, points.some(isShown) ? name : `${name} (not known)`, dash])));
  whole.append(reading);
  view.element.addEventListener("mousemove", (event) => {
    const near = curves.map((curve) => [curve, curve.points.filter(isShown).reduce((best, point) =>
      (!best || Math.abs(toX(point.x) - event.offsetX) < Math.abs(toX(best.x) - event.offsetX) ? point : best), null)]).filter(([, point]) => point);
    reading.textContent = near.map(([curve, point]) => `${textOfPoint(curve, point)} at ${short(point.x)}`).join("; ");
  });
}

keepDrawn(async () => {
  const place = element("div", { class: "pair even" });
  document.querySelector("#details .charts").append(place);
  for (const plot of DATA.plots) studyPlot(place, plot);
  drawn();
});
