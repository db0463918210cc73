"use strict";
/* The page while a run goes: events of columns are put together, and the charts follow once a second. */

const REDRAW_MS = 1000, SHARE_OF_TIME = 0.1, MOST_EVENTS = 2000;

async function follow() {
  const source = new EventSource("live"), arrived = [], shapes = {};
  let planned = 0, spent = 0;
  const notice = element("p", { class: "alarm", role: "status" });
  const header = document.querySelector("header"), lines = document.querySelector("#answer");
  header.after(notice);
  lines.classList.add("live");
  lines.replaceChildren(element("p", {}, "Waiting for the first numbers: a run is prepared before it begins."));
  const plan = () => {
    if (!planned && !document.hidden) planned = setTimeout(() => requestAnimationFrame(() => draw().catch(fail)), Math.max(REDRAW_MS, spent / SHARE_OF_TIME));
  };
  const fail = (error) => { notice.textContent = `The charts cannot be drawn (${error.message}): load the page again.`; };
  const draw = async () => {
    const began = performance.now();
    const fresh = DATA.parts && await takeIn(DATA, arrived.splice(0));
    if (!DATA.live) return; // the report has come meanwhile
    Object.assign(DATA, fresh);
    if (fresh) {
      for (const [name, shape] of Object.entries(shapesOf(DATA))) {
        if (shape !== shapes[name]) drawCharts(DATA, [name]);
        shapes[name] = shape;
      }
      paintAll();
    }
    spent = performance.now() - began;
    planned = 0;
    if (fresh && arrived.length) plan();
  };
  const on = (name, take) => source.addEventListener(name, (event) => take(JSON.parse(event.data)));
  on("state", ({ facts, title, html }) => {
    if (DATA.run && facts.run !== DATA.run) location.reload();
    Object.assign(DATA, facts);
    document.title = title;
    header.replaceChildren(element("h1", {}, title));
    lines.innerHTML = html; // escaped as in a report
    plan();
  });
  on("rows", (rows) => {
    arrived.push(rows);
    if (arrived.length > MOST_EVENTS) arrived.shift(); // the page is out of sight
    plan();
  });
  on("final", ({ note, sections, data }) => {
    source.close();
    if (!data) return notice.replaceWith(element("p", { class: "strong", role: "status" }, note));
    for (const name of Object.keys(DATA)) if (name !== "titles") delete DATA[name];
    Object.assign(DATA, data);
    document.querySelector("main").innerHTML = sections; // as above
    document.querySelector("header").after(element("p", { class: "strong" }, note));
    openPage();
  });
  source.addEventListener("open", () => notice.replaceChildren());
  source.addEventListener("error", () => {
    if (notice.textContent) return;
    notice.textContent = `No connection to Sidelight since ${new Date().toLocaleTimeString()}: what stands below is of then. `
      + (source.readyState === EventSource.CLOSED ? "Load the page again." : "It is tried again.");
  });
  document.addEventListener("visibilitychange", plan);
}

/* Return what a run has with more events of rows, without what was sent before it `begin`s. */
async function takeIn({ begin = 0, gauges = [], marks = [], labels = {}, parts, columns = { sent: { values: [] } } }, events) {
  const tables = [], held = gauges.map((gauge) => ({ ...gauge, times: [...gauge.times], values: [...gauge.values] }));
  for (const rows of events) {
    for (const table of rows.tables) tables.push(await unpack(table));
    const read = await unpack(rows.gaugesAt);
    rows.gauges.forEach((gauge, at) => {
      let whole = held.find(({ name, address }) => name === gauge.name && address === gauge.address);
      if (!whole) held.push(whole = { ...gauge, times: [], values: [] });
      whole.times.push(...read[`time${at}`].values);
      whole.values.push(...read[`value${at}`].values);
    });
    marks = [...marks, ...rows.marks];
    labels = { ...labels, ...rows.labels };
  }
  for (const gauge of held) {
    const gone = Math.max(0, placeOf(gauge.times, begin));
    for (const name of ["times", "values"]) gauge[name] = Float64Array.from(gauge[name].slice(gone));
  }
  parts = parts.map((part) => ({ ...part, label: labels[part.name] || part.label }));
  return {
    parts, labels, gauges: held, marks: marks.filter(({ at }) => at >= begin), columns: derive(merge(columns, tables, begin), parts),
    gaps: { itl: { values: [] } }, phases: [], percentiles: {}, engine: {},
  };
}

/* Put rows of tables behind those of `columns`, by when they were sent. A row with the index of another adds to what
that one says; without a time of its own it is nothing else. */
function merge(columns, tables, begin) {
  const all = [columns, ...tables], places = new Map(), sent = [];
  const targets = all.map((table) => Int32Array.from((table.sent || table.index).values, (at, row) => {
    const index = valueOf(table, "index", row), known = places.get(index);
    if (known !== undefined) return known;
    if (!table.sent || at < begin) return -1;
    if (!Number.isNaN(index)) places.set(index, sent.length);
    return sent.push(at) - 1;
  }));
  const ranks = new Int32Array(sent.length);
  [...sent.keys()].sort((a, b) => sent[a] - sent[b] || a - b).forEach((place, rank) => { ranks[place] = rank; });
  const merged = {};
  for (const name of new Set(all.flatMap(Object.keys))) {
    const values = new Float64Array(sent.length).fill(NaN), codes = new Map(), isText = all.some((table) => table[name]?.texts);
    all.forEach(({ [name]: column }, at) => column?.values.forEach((value, row) => {
      if (targets[at][row] < 0 || Number.isNaN(value)) return;
      const text = column.texts?.[value];
      if (column.texts && !codes.has(text)) codes.set(text, codes.size);
      values[ranks[targets[at][row]]] = column.texts ? codes.get(text) : value;
    }));
    merged[name] = { values, texts: isText ? [...codes.keys()] : undefined };
  }
  return merged;
}

/* What charts are laid out for: those of another shape are made anew, and what was chosen in them is kept. */
function shapesOf(run) {
  const { columns, gauges } = run, parts = partsOf(run);
  const rows = [partRows, loadRows, cacheRows].map((of) => of(run).map(({ label }) => label));
  const marks = [...new Set(marksOf(run).map(({ kind }) => kind))].sort();
  const time = `${[...rows, marks]}`;
  if (!columns.sent.values.length) return gauges.length ? { time } : {};
  const labels = parts.map(({ label }) => label), filters = FILTERS.map(([name]) => columns[name]?.texts?.slice().sort());
  const curves = ["ttft", "e2e", "tpot", ...parts.map(({ name }) => name)].filter((name) => valuesOf(run, name).at(-1) > 0);
  return { time, requests: JSON.stringify([labels, filters]), spread: `${[labels, curves]}` };
}
