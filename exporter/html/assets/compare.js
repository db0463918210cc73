"use strict";
/* Several runs in the same charts: a curve a run, by its colour and its dashes. */

function comparisonCharts(timePlace, spreadPlace, runs) {
  const styles = runs.map(({ label }, at) => ({ label, hue: HUES[at], dash: DASHES[at] }));
  const known = runs[0].parts.filter(({ name }) => runs.some((run) => partsOf(run).some((part) => part.name === name)));
  const times = [{ name: "ttft", label: "TTFT" }, ...known.map(({ name, label }) => ({ name, label: `TTFT, part “${label}”` }))];
  const rowsOf = (row) => runs.flatMap((run, at) => row(run).map((of) => ({ ...of, name: styles[at].hue, label: styles[at].label, dash: styles[at].dash })));
  const means = (name) => rowsOf((run) => [{ text: ms, mean: true, at: (steps) => meansOf(run, steps)[name] ?? new Array(steps.count).fill(null) }]);
  const loads = [["in flight", "Requests in flight at the client"], ["running", "Requests running in the engines"], ["waiting", "Requests waiting in the engines"]];
  onOneAxis(timePlace, runs, [
    ...times.map(({ name, label }) => [`${label}: mean of the requests submitted in each step`, name === "ttft" ? 200 : 130, means(name)]),
    ...loads.map(([label, caption]) => [`${caption}; the most in each step`, 130, rowsOf((run) => loadRows(run).filter((row) => row.label === label))]),
    ["KV cache in use, of the fullest engine; the most in each step", 110, rowsOf(cacheRows)],
  ]);
  const pair = element("div", { class: "pair even" });
  spreadPlace.append(pair);
  for (const { name, label } of [...times, { name: "e2e", label: "End-to-end time" }, { name: "tpot", label: "Time per output token" }, { name: "itl", label: "Gaps between chunks" }]) {
    distribution(pair, `${label}, ms`, runs.map((run, at) => ({ run, name, ...styles[at] })));
  }
  marksNote(spreadPlace, runs);
}
