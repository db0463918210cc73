"use strict";
/* Put the charts where the page has places for them. Without this, its tables stand open. */

async function open() {
  const [columns, read, gaps] = await Promise.all([DATA.requests, DATA.gaugesAt, DATA.gaps].map(unpack));
  derive(columns);
  const gauges = DATA.gauges.map((gauge, at) => ({ ...gauge, times: read[`time${at}`].values, values: read[`value${at}`].values }));
  const places = (name) => document.querySelector(`#${name} .charts`);
  if (columns.sent.values.length) {
    timeCharts(places("time"), columns, gauges);
    waterfall(places("requests"), columns, gauges);
    spreadCharts(places("spread"), columns, gaps);
    causeCharts(places("causes"), columns);
  }
  for (const section of document.querySelectorAll("section")) {
    const details = section.querySelector("details");
    if (details && section.querySelector("canvas")) details.open = false;
  }
  paintAll();
  redraw();
  document.documentElement.dataset.ready = "true";
}

/* The size of the window, the theme and paper change what is drawn. */
function redraw() {
  let pending = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(paintAll);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
  const onPaper = (paper) => () => {
    document.documentElement.classList.toggle("paper", paper);
    if (paper) for (const details of document.querySelectorAll("details")) details.open = true;
    paintAll();
  };
  window.addEventListener("beforeprint", onPaper(true));
  window.addEventListener("afterprint", onPaper(false));
}

open().catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "warning" }, `The charts cannot be drawn: ${error.message}. The tables are complete.`));
});
