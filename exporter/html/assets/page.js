"use strict";
/* Put the charts where the page has places for them. Without this, its tables stand open. */

async function openPage() {
  const places = (name) => document.querySelector(`#${name} .charts`);
  await Promise.all((DATA.runs || [DATA]).map(openRun));
  if (DATA.runs) comparisonCharts(places("time"), places("spread"), DATA.runs);
  else if (DATA.columns.sent.values.length) {
    timeCharts(places("time"), DATA);
    waterfall(places("requests"), DATA);
    spreadCharts(places("spread"), DATA);
    causeCharts(places("causes"), DATA);
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

openPage().catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "warning" }, `The charts cannot be drawn: ${error.message}. The tables are complete.`));
});
