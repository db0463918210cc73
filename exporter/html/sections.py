"""The sections of the page in the order in which they are read: text and tables, each with a place for charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from exporter.comparison import Compared, configuration_table, doubts, runs_table, times_table
from exporter.html.first_screen import bar, figures
from exporter.html.generator import generator_table, how_sure
from exporter.html.markup import blocks, escape, page_header
from exporter.html.slices import slices_table
from exporter.report.alerts import alerts, severe_lines
from exporter.report.conclusion import conclusion
from exporter.report.format import Prose, table
from exporter.report.heading import heading
from exporter.report.load import rate_lines
from exporter.report.method import method
from exporter.report.objectives import objectives
from exporter.report.tables.association import association_line
from exporter.report.tables.breakdown import breakdown_table, group_tables
from exporter.report.tables.client import client_section
from exporter.report.tables.energy import energy_section
from exporter.report.tables.gateways import gateway_lines
from exporter.report.tables.percentiles import percentiles_table
from exporter.report.tables.server import server_section
from exporter.report.tables.slowest import slowest_section
from exporter.summary.result import Summary
from rundir.printable.numbers import setting

NO_SCRIPT = "<noscript><p>The charts need JavaScript. The tables are complete without it.</p></noscript>"


def sections(summary: Summary) -> Iterator[str]:
    """Yield the sections of a summary. The script finds the place for its charts by a section's name."""
    correlation = summary.correlation
    yield page_header(heading(summary)) + NO_SCRIPT
    yield section("answer", "", _state(summary), _answer(summary))
    if summary.client.requests.sent:
        trust = blocks([*_prose(how_sure(summary)), *_prose(method(summary))])
        trust += "" if summary.watch else f"\n{blocks([generator_table(summary.self_check)])}"
        yield f'<details id="method"><summary>How far these numbers can be trusted</summary>\n{trust}\n</details>'
        if not correlation.missing:
            parts = [breakdown_table(correlation.breakdown), *group_tables(correlation)]
            yield section("parts", "", parts)
        yield section("time", "Over time", behind=("By time", [slices_table(summary)]))
        slowest = slowest_section(correlation.slowest, correlation.breakdown)
        yield section("requests", "Every request", behind=("The slowest", slowest))
        percentiles = [*client_section(summary), percentiles_table(summary), *server_section(summary)]
        percentiles += _prose(gateway_lines(summary))
        yield section("spread", "How times are spread", behind=("Percentiles", percentiles))
        yield section("causes", "What a long wait went with", _prose(association_line(correlation.association)))
    else:
        yield section("spread", "The engine", [*server_section(summary), *_prose(gateway_lines(summary))])
    yield section("about", "Configuration", [_configuration(summary), *energy_section(summary.hardware)])


def comparison_sections(runs: Sequence[Compared]) -> Iterator[str]:
    """Yield the sections of several runs beside each other."""
    legend = ", ".join(f"{run.label} is {run.name}" for run in runs)
    yield page_header(Text(f"{len(runs)} runs compared\n{legend}")) + NO_SCRIPT
    yield section("answer", "", doubts(runs))
    yield section("about", "What is compared", [runs_table(runs), configuration_table(runs)])
    yield section("times", "Times", [times_table(runs)])
    behind = [piece for run in runs for piece in (Prose(run.label, "bold"), slices_table(run.summary))]
    yield section("time", "Over time, each run from its own start", behind=("By time", behind))
    behind = [piece for run in runs for piece in (Prose(run.label, "bold"), percentiles_table(run.summary))]
    yield section("spread", "How times are spread", behind=("Percentiles", behind))


def live_sections() -> Iterator[str]:
    """Yield the sections of the live page, which its script fills."""
    yield "<header></header>"
    yield section("answer", "", [Text("This page needs JavaScript: its charts are drawn as requests end.")])
    yield section("time", "Over time, at most the last 15 minutes")
    yield section("requests", "Every request that ended")
    differs = "These are of requests that ended; p50 and p99 at the top of a run count each first token as it comes, "
    differs += "the mean those whose parts are known, and a watch has its last minutes there."
    yield section("spread", "How times are spread", [Prose(differs, "dim")])


def _state(summary: Summary) -> Iterator[RenderableType]:
    """Yield the warnings, the objectives, and four figures."""
    yield from (Prose(f"! {line}", "red") for line in severe_lines(summary))
    yield from (Prose(f"! {line}", "yellow") for line in alerts(summary))
    if summary.client.requests.sent:
        yield from objectives(summary)
        yield figures(summary)


def _answer(summary: Summary) -> str:
    """Return the parts of the TTFT in a picture and in words, and the rates."""
    if not summary.client.requests.sent:
        return ""
    words = [Prose(line, "bold") for line in conclusion(summary)]
    return f"{bar(summary)}\n{blocks([*words, *_prose(rate_lines(summary))])}"


def section(
    name: str,
    title: str,
    content: Iterable[RenderableType] = (),
    below: str = "",
    *,
    behind: tuple[str, Iterable[RenderableType]] | None = None,
) -> str:
    """Return a section with markup `below` its text; tables `behind` its charts are closed by the script that draws."""
    pieces = [f"<h2>{escape(title)}</h2>"] if title else []
    pieces += ['<div class="charts"></div>', blocks(content), below]
    if behind is not None:
        pieces.append(f"<details open><summary>{escape(behind[0])}</summary>\n{blocks(behind[1])}\n</details>")
    inside = "\n".join(filter(None, pieces))
    return f'<section id="{name}">\n{inside}\n</section>'


def _prose(lines: Iterable[str]) -> Iterator[Prose]:
    return map(Prose, lines)


def _configuration(summary: Summary) -> RenderableType:
    """Return the configuration as resolved, and the versions; what is not set is left out."""
    shown = table("", "value")
    shown.title = None
    shown.columns[1].justify = "left"
    facts = {"run": summary.run_id, "sidelight": summary.tool.version, "schema of summary.json": summary.schema_version}
    for name, value in (facts | summary.config).items():
        if value not in (None, "", [], {}, False):
            shown.add_row(Text(str(name).replace("_", " ")), Text(setting(name, value)))
    return shown
