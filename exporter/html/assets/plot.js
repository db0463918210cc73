"use strict";
/* What all charts share: elements, colours of the theme, numbers as the tables show them, axes on a canvas. */

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const grouped = (value, digits) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const ms = (value) => (Number.isFinite(value) ? grouped(value, Math.abs(value) >= 10 ? 1 : 2) : "-");

const cell = (value) =>
  !Number.isFinite(value) ? "-" : Number.isInteger(value) ? grouped(value, 0) : grouped(value, Math.abs(value) >= 10 ? 1 : 2);

/* Milliseconds on an axis: seconds from 1 s on; beside it (`finer`), little stays in ms. */
function axisMs(value, step, finer = 1) {
  if (finer > 1 && value && value < step / 50) return `${ms(value)} ms`;
  const seconds = step >= 100 || value >= 10000;
  const shown = seconds ? value / 1000 : value;
  const apart = seconds ? step / 1000 : step;
  return Number.isFinite(value) ? `${grouped(shown, digitsOf(apart / finer))} ${seconds ? "s" : "ms"}` : "-";
}

/* As many digits as tell places apart that are so far from each other. */
const digitsOf = (apart) => [0, 1, 2].find((places) => Math.abs(apart * 10 ** places - Math.round(apart * 10 ** places)) < 1e-6) ?? 3;

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const places = [];
  for (let place = Math.ceil(low / step) * step; place <= high + step / 1e6; place += step) places.push(place);
  return { step, places };
}

/* What draws itself again when the size, the theme or the data change, for as long as its place is in the page. */
let painted = [];
const whenPainted = (place, paint, end = () => {}) => { painted.push({ place, paint, end }); };

/* Add a canvas with a text alternative; `draw` gets its context and its size in CSS pixels. */
function canvas(place, height, label, draw) {
  const made = element("canvas", { role: "img", "aria-label": label });
  place.append(made);
  const paint = () => {
    const width = Math.max(200, place.clientWidth);
    const ratio = window.devicePixelRatio || 1;
    made.width = width * ratio;
    made.height = height * ratio;
    made.style.width = `${width}px`;
    made.style.height = `${height}px`;
    const context = made.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, height);
  };
  whenPainted(made, paint);
  return { element: made, paint };
}

function paintAll() {
  for (const { place, end } of painted) if (!place.isConnected) end();
  painted = painted.filter(({ place }) => place.isConnected);
  for (const { paint } of painted) paint();
}

/* Draw axes into a box and return how values become pixels. A logarithmic axis begins at `low` above 0. */
function axes(context, box, x, y) {
  const across = scale(x, box.left, box.right), up = scale(y, box.bottom, box.top);
  context.strokeStyle = colour("line");
  context.fillStyle = colour("faint");
  context.lineWidth = 1;
  for (const [axis, along, vertical] of [[x, across, false], [y, up, true]]) {
    const { step, places } = axis.log ? decades(axis) : ticks(axis.low, axis.high, axis.ticks || 6);
    let free = 0;
    for (const value of places) {
      const at = Math.round(along(value)) + 0.5;
      context.beginPath();
      if (vertical) { context.moveTo(box.left, at); context.lineTo(box.right, at); }
      else { context.moveTo(at, box.top); context.lineTo(at, box.bottom); }
      context.stroke();
      const text = axis.text ? axis.text(value, axis.log ? value : step) : cell(Number(value.toPrecision(6)));
      context.textAlign = vertical ? "right" : "center";
      context.textBaseline = vertical ? "middle" : "top";
      const half = context.measureText(text).width / 2;
      if (vertical) context.fillText(text, box.left - 6, at);
      else if (at - half > free) context.fillText(text, at, box.bottom + 4), free = at + half + 4;
    }
  }
  context.textAlign = "right";
  context.textBaseline = "bottom";
  if (x.label) context.fillText(x.label, box.right, box.bottom + 34);
  return { across, up };
}

function scale({ low, high, log }, from, to) {
  const span = (log ? Math.log(high / low) : high - low) || 1;
  return (value) => from + ((to - from) * (log ? Math.log(Math.max(value, low) / low) : value - low)) / span;
}

function decades({ low, high }) {
  const places = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const factor of high / low > 2000 ? [1] : [1, 2, 5]) {
      if (factor * power >= low && factor * power <= high) places.push(factor * power);
    }
  }
  return { step: low, places };
}

function legend(entries) {
  return element("ul", { class: "legend" }, ...entries.map(([name, text, dash]) => {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = dash ? `repeating-linear-gradient(90deg, var(--${name}) 0 ${dash[0]}px, transparent 0 ${dash[0] + dash[1]}px)` : `var(--${name})`;
    if (dash) swatch.style.width = "2.2em";
    return element("li", { title: titleOf(text) }, swatch, text);
  }));
}

function figure(place, caption, ...children) {
  const made = element("figure", {}, element("figcaption", {}, caption), ...children);
  place.append(made);
  return made;
}

/* As title_of in terms.py. */
const titleOf = (label, words = label.replace(/^(·+ )?(or: )?/, "").toLowerCase().split(/[,:;]*\s+/).slice(0, 4)) =>
  Object.hasOwn(DATA.titles, words.join(" ")) ? DATA.titles[words.join(" ")] : words.length ? titleOf("", words.slice(0, -1)) : "";

function choice(label, options, chosen, change) {
  const select = element("select", {}, ...options.map(([value, text]) => element("option", { value: String(value) }, text)));
  select.value = String(chosen);
  select.addEventListener("change", () => change(select.value));
  return element("label", { title: titleOf(label) }, `${label} `, select);
}

function toggle(text, pressed, change) {
  const button = element("button", { type: "button", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    change(now);
  });
  return button;
}

/* The last place in an ascending array that is not above a value, -1 for none. */
function placeOf(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const drawn = () => { paintAll(); document.documentElement.dataset.ready = "true"; };

/* Draw, and again where the window, the theme or paper change. */
function keepDrawn(draw) {
  let pending = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(paintAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
  const onPaper = (paper) => () => {
    document.documentElement.classList.toggle("paper", paper);
    if (paper) for (const details of document.querySelectorAll("details")) details.open = true;
    paintAll();
  };
  window.addEventListener("beforeprint", onPaper(true));
  window.addEventListener("afterprint", onPaper(false));
  const warning = ({ message }) => element("p", { class: "warning" }, `The charts cannot be drawn: ${message}. The tables are complete.`);
  draw().catch((error) => document.querySelector("main").prepend(warning(error)));
}
