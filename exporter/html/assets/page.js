"use strict";
/* Put the charts where the page has places for them. Without this, its tables stand open. */

async function openPage() {
  await Promise.all((DATA.runs || [DATA]).map(openRun));
  if (DATA.runs) comparisonCharts(placeOfCharts("time"), placeOfCharts("spread"), DATA.runs);
  else if (DATA.columns.sent.values.length) drawCharts(DATA);
  for (const section of document.querySelectorAll("section")) {
    const details = section.querySelector("details");
    if (details && section.querySelector("canvas")) details.open = false;
  }
  paintAll();
  document.documentElement.dataset.ready = "true";
}

const placeOfCharts = (section) => document.querySelector(`#${section} .charts`);

/* Put charts in their places, where the page has them. */
const CHARTS = { time: timeCharts, requests: waterfall, spread: spreadCharts, causes: causeCharts };
function drawCharts(run, names = Object.keys(CHARTS)) {
  for (const name of names) {
    const place = placeOfCharts(name);
    place?.replaceChildren();
    if (place) CHARTS[name](place, run);
  }
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

redraw();
(DATA.live ? follow() : openPage()).catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "warning" }, `The charts cannot be drawn: ${error.message}. The tables are complete.`));
});
