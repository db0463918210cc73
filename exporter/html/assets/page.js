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
  drawn();
}

const placeOfCharts = (section) => document.querySelector(`#${section} .charts`);

const CHARTS = { time: timeCharts, requests: waterfall, spread: spreadCharts, causes: causeCharts };
function drawCharts(run, names = Object.keys(CHARTS)) {
  for (const name of names) {
    const place = placeOfCharts(name);
    place?.replaceChildren();
    if (place) CHARTS[name](place, run);
  }
}

keepDrawn(DATA.live ? follow : openPage);
