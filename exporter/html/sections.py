"""The sections of the page in the order in which they are read: text and tables, each with a place for charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sidelight.exporter.comparison import Compared, configuration_table, doubts, runs_table, times_table, verdict_on
from sidelight.exporter.document import Block, Line, Prose, Section, Table, table, words
from sidelight.exporter.html.markup import blocks, page_header, section
from sidelight.exporter.html.tables import generator_table, slices_table
from sidelight.exporter.report.heading import heading
from sidelight.exporter.report.method import generator_verdict, method
from sidelight.exporter.report.sections import prose
from sidelight.exporter.report.sections import sections as report_sections
from sidelight.exporter.report.tables.percentiles import percentiles_table
from sidelight.exporter.report.tables.server import association_line
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.numbers import count_of, setting

NO_SCRIPT = "<noscript><p>The charts need JavaScript. The tables are complete without it.</p></noscript>"


def sections(summary: Summary) -> Iterator[str]:
    """Yield the sections of a summary. The script finds the place for its charts by a section's name."""
    report = report_sections(summary)
    engine = *report["server"], *report["gateways"]
    answer = *report["verdict"], *report["objectives"]
    yield page_header(heading(summary)) + NO_SCRIPT
    yield section(Section(name="answer", content=answer))
    if summary.client.requests.sent:
        yield _trust(summary, report)
        yield section(Section(name="time", title="Over time", behind=("By time", (slices_table(summary),))))
        yield section(Section(name="requests", title="Every request", behind=("The slowest", report["slowest"])))
        percentiles = *report["client"], percentiles_table(summary), *engine
        yield section(Section(name="spread", title="How times are spread", behind=("Percentiles", percentiles)))
        related = prose(association_line(summary.correlation.association))
        yield section(Section(name="causes", title="What a long wait went with", content=tuple(related)))
        if report["parts"]:
            yield section(Section(name="parts", content=(*report["conclusion"], *report["parts"])))
    else:
        yield blocks(report["alerts"])
        yield section(Section(name="spread", title="The engine", content=engine))
    if report["shards"]:
        yield section(Section(name="shards", title="Shards", content=report["shards"]))
    about = _configuration(summary), *report["energy"]
    yield section(Section(name="about", title="Configuration", content=about))


def _trust(summary: Summary, report: Mapping[str, Sequence[Block]]) -> str:
    """Return the folded alerts, with their number, and all that the numbers rest on."""
    alerts = sum(isinstance(block, Prose) and bool(block.text) for block in report["alerts"])
    warned = f" ({count_of(alerts, 'warning')})" if alerts else ""
    content = blocks([*report["alerts"], *prose(how_sure(summary)), *prose(method(summary))])
    table = "" if summary.watch else f"\n{blocks([generator_table(summary.self_check)])}"
    head = f"<summary>How far these numbers can be trusted{warned}</summary>"
    return f'<details id="method">{head}\n{content}{table}\n</details>'


def comparison_sections(runs: Sequence[Compared]) -> Iterator[str]:
    """Yield the sections of several runs beside each other."""
    legend = ", ".join(f"{run.label} is {run.name}" for run in runs)
    yield page_header((Line(((f"{len(runs)} runs compared", ""),)), Prose(legend))) + NO_SCRIPT
    by_time: list[Block] = []
    percentiles: list[Block] = []
    for run in runs:
        by_time.append(_named(run.label, slices_table(run.summary)))
        percentiles.append(_named(run.label, percentiles_table(run.summary)))
    own_start = "Over time, each run from its own start"
    yield from map(section, (
        Section(name="answer", content=tuple(verdict_on(runs))),
        Section(name="method", behind=("How far these numbers can be trusted", tuple(doubts(runs)))),
        Section(name="about", title="What is compared", content=(runs_table(runs), configuration_table(runs))),
        Section(name="times", title="Times", content=(times_table(runs),)),
        Section(name="time", title=own_start, behind=("By time", tuple(by_time))),
        Section(name="spread", title="How times are spread", behind=("Percentiles", tuple(percentiles))),
    ))  # fmt: skip


def _named(label: str, table: Table) -> Table:
    """Return the table of a run among several, under its label."""
    return replace(table, title=f"{label}: {table.title}")


def live_sections() -> Iterator[str]:
    """Yield the sections of the live page, which its script fills."""
    differs = "These are of requests that ended; p50 and p99 at the top of a run count each first token as it comes, "
    differs += "the mean those whose parts are known, and a watch has its last minutes there."
    needed = Prose("This page needs JavaScript: its charts are drawn as requests end.")
    yield "<header></header>"
    yield from map(section, (
        Section(name="answer", content=(needed,)),
        Section(name="time", title="Over time, at most the last 15 minutes"),
        Section(name="requests", title="Every request that ended"),
        Section(name="spread", title="How times are spread", content=(Prose(differs, "note"),)),
    ))  # fmt: skip


def _configuration(summary: Summary) -> Table:
    """Return the configuration as resolved, and the versions; what is not set is left out."""
    facts = {"run": summary.run_id, "sidelight": summary.tool.version, "schema of summary.json": summary.schema_version}
    rows = (
        (str(name).replace("_", " "), setting(name, value))
        for name, value in (facts | summary.config).items()
        if value not in (None, "", [], {}, False)
    )
    return table("", [words("value")], rows)


def how_sure(summary: Summary) -> Iterator[str]:
    """Yield the reason for a missing queue threshold, and the verdict on the load generator."""
    tail = summary.correlation.tail_attribution
    unknown = not tail.missing and tail.largest == "queue" and tail.threshold and tail.threshold.missing
    if not summary.correlation.missing and unknown:
        every = summary.config.get("scrape_interval")
        age = f" (pages were read every {every:g} s)" if every else ""
        yield f"No queue length can be given from which requests are slow: {unknown}{age}."
    if not summary.watch:
        yield generator_verdict(summary)
