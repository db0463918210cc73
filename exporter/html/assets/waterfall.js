"use strict";
/* Every request as one bar in the colours of its parts: filtered, sorted, scrolled; one in full beside. */

const LEAST_ROW_PX = 9, MOST_ROW_PX = 18, LIST_PX = 416, AXIS_PX = 26, LEFT_PX = 8;
const FILTERS = [["phase"], ["class"], ["address", "URL"], ["engine"], ["status"], ["quality"]];

function waterfall(place, run) {
  const state = (run.list ??= { filters: { phase: "measure" }, sort: "ttft", clock: false, chosen: null });
  const detail = element("div", { class: "detail", "aria-live": "polite" });
  const list = element("div", { class: "scroll", tabindex: "0", role: "application",
    "aria-label": "Requests as bars; arrow keys choose one, its numbers stand beside." });
  const count = element("span", { class: "note", role: "status" });
  const view = canvas(list, LIST_PX, "", (context, width) => {
    if (state.columns !== run.columns || state.view !== run.view) {
      arrange();
      showDetail();
    }
    drawBars(context, width, state, run, list.scrollTop);
  });
  view.element.setAttribute("aria-hidden", "true");
  const spacer = element("div"), colours = element("div");
  list.append(spacer);
  const showDetail = () => {
    const fresh = state.at < 0 ? element("p", { class: "note" }, "Choose a request to see all its numbers.") : detailOf(run, state.rows[state.at]);
    if (fresh.textContent !== detail.textContent) detail.replaceChildren(fresh); // else what is selected in it stays so
  };
  const choose = (at) => {
    if (!state.rows.length) return;
    state.at = Math.max(0, Math.min(state.rows.length - 1, at));
    state.chosen = identity(run.columns, state.rows[state.at]);
    const top = state.at * state.tall;
    const room = LIST_PX - AXIS_PX - state.tall;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top > list.scrollTop + room) list.scrollTop = top - room;
    showDetail();
    view.paint();
  };
  const arrange = () => {
    const { columns } = run;
    if (state.columns !== columns) {
      state.all = sorted(filtered(columns, state.filters), columns, state.sort);
      colours.replaceChildren(partsLegend(run));
    }
    [state.columns, state.view] = [columns, run.view];
    state.rows = sentIn(state.view, columns.sent.values, state.all);
    state.range = rangeOf(state.rows, columns, state.clock);
    state.tall = Math.max(LEAST_ROW_PX, Math.min(MOST_ROW_PX, Math.floor((LIST_PX - AXIS_PX) / Math.max(1, state.rows.length))));
    spacer.style.height = `${Math.max(0, state.rows.length * state.tall + AXIS_PX - LIST_PX)}px`;
    count.textContent = `${cell(state.rows.length)} of ${cell(columns.sent.values.length)} requests${state.view ? `, sent from ${between(...state.view.map((edge) => edge / 1000))}, as the charts over time show` : ""}${DATA.byClock ? "; those without a breakdown are not drawn" : ""}`;
    state.at = state.chosen ? state.rows.findIndex((row) => identity(columns, row) === state.chosen) : -1;
  };
  const refresh = () => {
    list.scrollTop = 0;
    state.columns = null;
    view.paint();
  };
  list.addEventListener("scroll", view.paint);
  view.element.addEventListener("click", (event) => {
    choose(Math.floor((list.scrollTop + event.offsetY - AXIS_PX) / state.tall));
  });
  list.addEventListener("keydown", (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 40, PageUp: -40, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(state.at < 0 ? 0 : state.at + steps[event.key]);
  });
  place.append(controls(run, state, refresh), colours,
    element("div", { class: "pair" }, element("div", {}, list, count), detail));
  state.columns = null;
  run.zoomed = view.paint;
  view.paint();
}

const sentIn = (view, sent, rows) => (view ? rows.filter((row) => sent[row] >= view[0] && sent[row] <= view[1]) : rows);

/* What a request is known by when others come and rows are numbered anew: no two begin and end at the same times. */
const identity = (columns, row) => `${[valueOf(columns, "sent", row), valueOf(columns, "e2e", row)]}`;

function controls(run, state, refresh) {
  const { columns } = run;
  const set = (change) => (value) => { change(value); refresh(); };
  const keys = [["ttft", "TTFT"], ["sent", "start"], ["e2e", "end-to-end time"], ...partsOf(run).map(({ name, label }) => [name, label])];
  const filters = FILTERS.filter(([name]) => columns[name]?.texts.filter((text) => text).length > 1).map(([name, label = name]) =>
    choice(label, [["", "all"], ...columns[name].texts.filter((text) => text).sort().map((text) => [text, text])], state.filters[name] || "",
      set((value) => { state.filters[name] = value; })));
  return element("div", { class: "controls", role: "group", "aria-label": "Which requests, in which order" },
    choice("sorted by", keys, state.sort, set((value) => { state.sort = value; })), ...filters,
    toggle("by the clock, to the last token", state.clock, set((value) => { state.clock = value; })));
}

function partsLegend(run) {
  const { columns } = run, entries = partsOf(run).map(({ name, label }) => [name, label]);
  const rows = [...columns.sent.values.keys()], errors = ascending(rows, (row) => valueOf(columns, "error", row) || NaN);
  if (rows.some((row) => !isCovered(columns, row))) entries.push(["rest", run.live ? "no breakdown, or not yet" : "no breakdown"]);
  entries.push(["decode", "after the first token (by the clock)"]);
  if (errors.length) entries.push(["line", `pale: within the standard error of an estimated bound (${ms(quantile(errors, 0.5))} ms in the median)`]);
  if (rows.some((row) => isFailed(columns, row))) entries.push(["alarm", "red end: did not succeed"]);
  return legend(entries);
}

function filtered(columns, filters) {
  const wanted = Object.entries(filters).filter(([name, text]) => text && columns[name])
    .map(([name, text]) => [columns[name].values, columns[name].texts.indexOf(text)]);
  const rows = [];
  for (let row = 0; row < columns.sent.values.length; row++) {
    if (wanted.every(([values, code]) => values[row] === code)) rows.push(row);
  }
  return rows;
}

function sorted(rows, columns, key) {
  if (key === "sent") return rows;
  const values = Float64Array.from({ length: columns.sent.values.length }, () => -Infinity);
  for (const row of rows) {
    const value = valueOf(columns, key, row);
    if (!Number.isNaN(value)) values[row] = value;
  }
  return rows.sort((a, b) => values[b] - values[a] || a - b);
}

function drawBars(context, width, state, run, top) {
  const { rows, clock, tall, columns } = state;
  const first = Math.floor(top / tall), last = Math.min(rows.length, Math.ceil((top + LIST_PX) / tall));
  // By the clock the axis goes along with what is in sight: a request is short beside a run.
  const range = clock ? rangeOf(rows.slice(first, last), columns, clock) : state.range;
  const place = scale(range, LEFT_PX, width - 16);
  for (let at = first; at < last; at++) {
    const y = AXIS_PX + at * tall - top;
    if (at === state.at) {
      context.fillStyle = colour("line");
      context.fillRect(0, y, width, tall);
    }
    drawBar(context, run, rows[at], clock ? valueOf(columns, "sent", rows[at]) : 0, place, y + 1, tall - 2, clock);
  }
  context.fillStyle = colour("paper");
  context.fillRect(0, 0, width, AXIS_PX - 2);
  context.fillStyle = colour("faint");
  context.textBaseline = "middle";
  const { step, places } = ticks(range.low, range.high, width / 110);
  for (const value of places) {
    const text = axisMs(value, step), half = context.measureText(text).width / 2;
    context.textAlign = "center";
    context.fillText(text, Math.max(LEFT_PX + half, Math.min(place(value), width - half - 4)), AXIS_PX / 2);
  }
}

function rangeOf(rows, columns, clock) {
  let low = clock ? Infinity : 0, high = 1;
  for (const row of rows) {
    const sent = clock ? valueOf(columns, "sent", row) : 0;
    const whole = clock ? valueOf(columns, "e2e", row) : valueOf(columns, "ttft", row);
    low = Math.min(low, sent);
    if (!Number.isNaN(whole)) high = Math.max(high, sent + whole);
  }
  return { low: Number.isFinite(low) ? low : 0, high };
}

/* Parts in order, pale within an estimate's error, red where it failed. */
function drawBar(context, run, row, begin, place, y, tall, clock) {
  const { columns, parts } = run;
  const ttft = valueOf(columns, "ttft", row), e2e = valueOf(columns, "e2e", row);
  const bar = (from, to, name) => {
    context.fillStyle = colour(name);
    context.fillRect(place(begin + from), y, Math.max(0.5, place(begin + to) - place(begin + from)), tall);
  };
  let at = 0, known = 0;
  if (isCovered(columns, row)) {
    for (const { name } of parts) {
      const part = Math.max(0, valueOf(columns, name, row) || 0);
      if (part) bar(at, at + part, name);
      at += part;
      if (name === "queue") known = at;
    }
  } else if (ttft > 0) bar(0, ttft, "rest");
  if (clock && e2e > ttft) bar(ttft, e2e, "decode");
  const error = valueOf(columns, "error", row);
  if (error > 0) {
    context.globalAlpha = 0.5;
    bar(Math.max(0, known - error), Math.min(ttft, known + error), "paper");
    context.globalAlpha = 1;
  }
  if (isFailed(columns, row)) {
    context.fillStyle = colour("alarm");
    context.fillRect(place(begin + (Number.isFinite(e2e) ? (clock ? e2e : Math.min(e2e, ttft || 0)) : 0)), y, 3, tall);
  }
}

function detailOf(run, row) {
  const { columns, gauges, parts, inner } = run;
  const facts = [["request", requestId(run, row)], ["trace", traceLink(run.traceUrl, traceId(run, row))]];
  const number = (label, name, text = ms) => {
    const value = valueOf(columns, name, row);
    if (!Number.isNaN(value)) facts.push([label, text(value)]);
  };
  const worded = (label, name) => {
    const text = textOf(columns, name, row);
    if (text) facts.push([label, text]);
  };
  facts.push(["sent after the start", `${grouped(valueOf(columns, "sent", row) / 1000, 3)} s`]);
  number("TTFT, ms", "ttft");
  for (const { name, label } of parts) {
    number(`· ${label}`, name);
    for (const part of inner) if (part.within === name) number(`·· ${part.name.endsWith("round_trip") ? "or: " : ""}${part.label}`, part.name);
  }
  number("standard error of the parts", "error");
  number("TPOT, ms", "tpot"), number("E2E, ms", "e2e");
  number("decode by the engine, ms", "decode");
  number("sent late by, ms", "late");
  for (const [label, name] of [["waiting just before", "waiting"], ["running just before", "running"], ["output tokens", "output"], ["input tokens", "input"], ["of them cached", "cached"]]) number(label, name, cell);
  for (const key in columns) if (key[0] === "·") number(key, key, cell);
  for (const [label, name = label] of [["status"], ["error", "message"], ["finish reason", "finish"], ["class"], ["URL", "address"], ["engine"], ["phase"], ["breakdown from", "source"], ["quality"], ["other includes", "merged"], ["note", "reason"]]) worded(label, name);
  for (const { label, address, name, times, values } of gauges) {
    const at = placeOf(times, valueOf(columns, "sent", row));
    if (at >= 0) facts.push([`${label}, ${address}`, name === "kv_cache_usage" ? `${grouped(100 * values[at], 1)} %` : cell(values[at])]);
  }
  return element("table", {}, element("tbody", {}, ...facts.map(([label, value]) =>
    element("tr", {}, element("th", { scope: "row", title: titleOf(label) }, label), element("td", {}, value)))));
}

function traceLink(address, id) {
  if (!/^https?:\/\//.test(address)) return id;
  return element("a", { href: address.replaceAll("{trace_id}", id), rel: "noreferrer" }, id);
}
