"""The files of a study for people: both reports, the page and the tables, the same however often they are derived."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from html_page import ATTACK, Page
from studies import ANSWER, NOTES, VERDICT, findings, quantity, result

from sidelight.methodology.compliance.statement import Compliance, Judgement
from sidelight.methodology.report.files import study_files
from sidelight.methodology.report.page import SCRIPTS, STYLES
from sidelight.methodology.report.tables import joined
from sidelight.methodology.study.findings import Plot, PlotLine, ResultColumn, ResultTable, StudyFindings
from sidelight.methodology.study.model import Parameters
from sidelight.methodology.study.result import StudyResult
from sidelight.recorded.system import System

MINIMUM = [
    "=== LLM Benchmark Report (Minimum) ===",
    "System Identification:", "- Model", "- Hardware", "- Software", "- SUT Boundary",
    "Test Configuration:", "- Workload", "- Load Model", "- Request Count", "- Test Duration",
    "Key Results:", "- TTFT P50", "- TTFT P99", "- TPOT P50", "- TPOT P99", "- Max Throughput",
    "- Throughput at P99 TTFT < 500ms",
    "Notes:",
]  # fmt: skip
SECTIONS = (
    "1. System Identification", "2. Test Configuration", "3. Results", "4. Detailed Results",
    "5. Methodology Compliance", "6. Reproduction Information",
)  # fmt: skip
ESCAPE = "\x1b[2J"


NOTHING_REQUIRED = Compliance(
    test="throughput", verdict="unconditional", sentence="Nothing was required.", contradictions=[], requirements=[]
)


def files(of: StudyResult | None = None, derived: StudyFindings | None = None) -> dict[str, str]:
    return dict(study_files(of or result(), derived or findings(), NOTHING_REQUIRED))


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return files()


def test_a_study_derived_twice_has_the_same_files(written: dict[str, str]):
    """Byte for byte."""
    assert written == files()


def test_the_report_begins_with_verdict_and_answer_and_has_the_drafts_sections(written: dict[str, str]):
    """After the lines that say which study it is, and in the draft's order."""
    lines = written["report.txt"].splitlines()
    begin = lines.index("") + 1
    assert lines[begin] == VERDICT.headline
    assert lines[lines.index("", begin) + 1 :][: len(ANSWER)] == list(ANSWER)
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    assert max(map(len, lines)) <= 100
    for title in ("Throughput Summary", "Latency at Maximum Throughput"):
        assert title in lines


def test_the_minimum_report_has_the_drafts_headings_and_fields(written: dict[str, str]):
    """All of them in order, and of what was not measured that it was not."""
    lines = [line for line in written["report-minimum.txt"].splitlines() if line]
    assert [line.partition(": ")[0] if line.startswith("-") else line for line in lines[: len(MINIMUM)]] == MINIMUM
    assert lines[len(MINIMUM)] == f"- {NOTES[0]}"
    assert lines[-1] == "=== End Report ==="
    assert "- TTFT P99: 1,873.5 ms (at least 1,640, 95 %)" in lines
    assert "- TPOT P99: not measured (the test throughput has no such result)" in lines


def test_the_minimum_report_states_no_throughput_of_another_objective():
    """An objective other than the draft's is named instead."""
    other = result(parameters=Parameters(slo="tpot_p99<50ms"))
    line = "- Throughput at P99 TTFT < 500ms: not measured (the objective of this study was tpot_p99<50ms)"
    assert line in files(other)["report-minimum.txt"].splitlines()


def test_the_minimum_report_says_at_which_load_a_latency_was_measured():
    """The load of the study is that of all its steps."""
    known = result()
    at = {**known.results, "ttft_p99_ms": msgspec.structs.replace(known.results["ttft_p99_ms"], at="5.41 requests/s")}
    lines = files(msgspec.structs.replace(known, results=at))["report-minimum.txt"].splitlines()
    assert "- TTFT P99: 1,873.5 ms (at least 1,640, 95 %; at 5.41 requests/s)" in lines


def test_what_is_missing_says_why(written: dict[str, str]):
    """In the report as a sentence, in the file as an empty cell with the reason; an open interval has one end."""
    reason = "the number of accelerators was not declared"
    assert f"Missing: output_tokens_per_gpu_s ({reason})." in written["report.txt"]
    assert "1,640 or more" in written["report.txt"]
    rows = {row["result"]: row for row in csv.DictReader(io.StringIO(written["tables/results.csv"]))}
    assert rows["output_tokens_per_gpu_s"]["value"] == ""
    assert rows["output_tokens_per_gpu_s"]["method"] == f"missing: {reason}"


def test_what_is_cut_or_too_little_says_where_more_is_and_what_is_known():
    """Of many results the first, with the file that has all; a percentile of few values with its bound, in a table."""
    few = msgspec.structs.replace(
        quantity(None, "ms", 470.0, None, missing="too few for P99: 104 values of 1,000 that are needed"), sample=1433.2
    )
    many = {f"result_{number}": quantity(float(number), "requests") for number in range(70)}
    text = files(result(results={**many, "ttft_p99_ms": few}))["report.txt"]
    assert "10 rows more in tables/results.csv." in text
    row = next(line for line in text.splitlines() if line.startswith(" ttft_p99_ms"))
    assert row.split()[:4] == ["ttft_p99_ms", "1,433", "470", "ms"]
    assert " result_12" in text
    assert "12.0" not in text  # a count is whole


def test_the_verdict_of_the_draft_stands_behind_the_answer():
    """And below it what is not met with what to do, what was declared and what was seen of the system."""
    cure = "declare `boundary: model engine`"
    system = System(
        model="llama", accelerator="H100", accelerator_count=2, seen={"model": "the server's list of models"}
    )
    unmet = Judgement(
        id="sut-boundary", level="must", section="sut-configurations", text="", state="not met",
        reason="boundary is not declared", evidence="study.json", value=None, cure=cure,
    )  # fmt: skip
    met = msgspec.structs.replace(unmet, id="seed", state="met", cure="")
    sentence = "The throughput test is not compliant with the draft: 1 of the 2 MUSTs that apply are not met."
    compliance = Compliance(
        test="throughput", verdict="not compliant", sentence=sentence, contradictions=[], requirements=[unmet, met],
        system=system,
    )  # fmt: skip
    judged = dict(study_files(result(), findings(), compliance))
    lines = judged["report.txt"].splitlines()
    assert lines[lines.index(ANSWER[-1]) + 1] == sentence
    rows = Page(judged["report.html"]).rows
    assert ["MUST", "sut-boundary", "boundary is not declared", cure.replace("`", "")] in rows
    assert ["model", "llama", "seen: the server's list of models"] in rows
    assert ["accelerator", "H100", "declared"] in rows
    assert "Met (1): seed." in lines
    counted = (
        "2 requirements: 1 met, 0 met by declaration, 1 not met, 0 not applicable. The 2 that apply: 2 MUSTs, "
        "0 SHOULDs, 0 that the draft states without a keyword."
    )
    assert counted in Page(judged["report.html"]).contents["p"]
    minimum = judged["report-minimum.txt"].splitlines()
    assert "- Not met, MUST: sut-boundary" in minimum
    assert "- Hardware: H100 x 2" in minimum


def test_reasons_that_differ_in_their_numbers_stand_once():
    """With the steps that they are of, and the range of each number that differs; a P99 stays one."""
    sentences = [
        (1, "The slowest 1 % (3 requests) spent 80 % of their TTFT in the queue."),
        (2, "TTFT hardly varies (p99 is 1.11 times p50): 98 % of it is spent in the queue."),
        (4, "The slowest 1 % (1,010 requests) spent 9.5 % of their TTFT in the queue."),
    ]
    assert list(joined(sentences)) == [
        ("1, 4", "The slowest 1 % (3 to 1,010 requests) spent 9.5 to 80 % of their TTFT in the queue."),
        ("2", sentences[1][1]),
    ]


def test_the_minimum_report_says_beside_the_maximum_what_a_full_server_gives():
    """The draft's maximum is of the highest load shown stable, and a full server serves more."""
    known = result().results
    results = {
        **known,
        "max_output_tokens_per_s": msgspec.structs.replace(
            known["max_output_tokens_per_s"], at="5.4 requests/s offered"
        ),
        "limit_output_tokens_per_s": quantity(960.4, "tokens/s", 950.0, 971.0),
        "slo_output_tokens_per_s": quantity(None, "tokens/s", missing="levels contradict each other"),
    }
    lines = files(result(results=results))["report-minimum.txt"].splitlines()
    at = "930 to 952, 95 %; at 5.4 requests/s offered; saturated: 960.4 tok/s (950 to 971, 95 %)"
    assert f"- Max Throughput: 941.2 tok/s ({at})" in lines
    assert "- Throughput at P99 TTFT < 500ms: not determined (levels contradict each other)" in lines


def test_a_partial_study_and_one_that_drifted_say_so_before_the_answer():
    """With the reason."""
    lines = files(result(status="partial", reason="the engine died twice"))["report.txt"].splitlines()
    assert lines[lines.index("") + 1].startswith("! The study is partial: the engine died twice. ")


def test_nothing_follows_of_a_study_whose_steps_are_all_void():
    """There is no step that counts."""
    void = result(status="partial", reason="held up")
    void = msgspec.structs.replace(void, steps=[msgspec.structs.replace(each, void="held up") for each in void.steps])
    lines = files(void)["report.txt"].splitlines()
    assert void.steps
    assert lines[lines.index("") + 1] == "! The study is partial: held up."


def test_a_reason_that_ends_in_a_question_has_no_full_stop_behind_it():
    """As that of a server that does not answer."""
    lines = files(result(status="partial", reason="no connection; is the server up?"))["report.txt"].splitlines()
    assert lines[lines.index("") + 1].startswith("! The study is partial: no connection; is the server up? What")


def test_tables_hold_numbers_in_full_and_nothing_that_a_spreadsheet_computes():
    """A text that begins as a formula does gets an apostrophe; numbers below zero stay numbers."""
    columns = (ResultColumn(name="name", title="Name"), ResultColumn(name="value", title="Value"))
    table = ResultTable(
        name="odd",
        title="Odd",
        columns=columns,
        rows=(("=1+1", -0.1 - 0.2), ("+x", None), ("plain", True), ("nan", float("nan"))),
    )
    text = files(derived=findings((table,)))["tables/odd.csv"]
    assert list(csv.reader(io.StringIO(text))) == [
        ["name", "value"], ["'=1+1", "-0.30000000000000004"], ["'+x", ""], ["plain", "True"], ["nan", ""],
    ]  # fmt: skip


def test_what_servers_said_stays_text():
    """Neither elements of the page nor controls of a terminal, in sentences, tables and names of plots."""
    table = ResultTable(
        name="t", title=ATTACK, columns=(ResultColumn(name="a", title=ATTACK),), rows=((ATTACK + ESCAPE,),)
    )
    line = PlotLine(name=ATTACK, x=(1.0,), y=(1.0,))
    plot = Plot(name="p", title=ATTACK, kind="line", x_title="x", y_title=ATTACK, lines=(line,))
    attacked = files(result(answer=[ATTACK + ESCAPE], notes=[ATTACK]), findings((table,), (plot,)))
    page = Page(attacked["report.html"])
    assert "img" not in {tag for tag, _ in page.elements}
    assert attacked["report.html"].count("</script") == 2
    assert any(ATTACK in text for text in page.contents["p"])
    for name in ("report.txt", "report.html", "report-minimum.txt"):
        assert "\x1b" not in attacked[name]


def test_the_page_allows_its_own_script_and_styles_alone(written: dict[str, str]):
    """By their hashes; links lead to the reports of the steps, and nothing is loaded from elsewhere."""
    page = Page(written["report.html"])
    policy = next(attrs["content"] or "" for _, attrs in page.elements if "http-equiv" in attrs)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
              for text in (page.contents["style"][0], page.contents["script"][1])]  # fmt: skip
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}';")
    links = [attrs["href"] for tag, attrs in page.elements if "href" in attrs]
    assert links[0] == "steps/0001-closed-32/report.txt"
    assert len(links) == 6
    assert not {
        name for _, attrs in page.elements for name in attrs if name in ("src", "style") or name.startswith("on")
    }


def test_the_page_has_the_data_that_its_scripts_share(written: dict[str, str]):
    """Legends of plots read names from the data that the page's script declares."""
    script = written["report.html"].rpartition("<script>")[2]
    assert "DATA.titles" in script
    assert script.count("const DATA = ") == 1


def test_the_page_has_every_table_without_its_script(written: dict[str, str]):
    """A table that the text has in pieces stands whole."""
    rows = Page(written["report.html"]).rows
    assert ["Max Output Throughput", "941", "tok/s"] in rows
    assert any(len(row) == 12 and row[0] == "6.20" and row[-1] == "growing" for row in rows)


def test_plots_are_in_the_page_without_what_is_no_number():
    """Gaps stay gaps, places that are not numbers go, and of many points as many as can be seen are left."""
    odd = PlotLine(name="odd", x=(1.0, float("nan"), 3.0), y=(float("inf"), 2.0, 3.25))
    many = PlotLine(name="many", x=tuple(map(float, range(9000))), y=tuple(map(float, range(9000))))
    plot = Plot(name="odd", title="Odd", kind="line", x_title="x", y_title="y", lines=(odd, many))
    data: Any = json.loads(Page(files(derived=findings(plots=(plot,)))["report.html"]).contents["script"][0])
    shown = data["plots"][-1]["lines"]
    assert (shown[0]["x"], shown[0]["y"], shown[0]["low"]) == ([1.0, 3.0], [None, 3.25], [None, None])
    assert (len(shown[1]["x"]), shown[1]["x"][0], shown[1]["x"][-1]) == (1000, 0.0, 8999.0)


def test_the_pages_script_and_styles_stay_small():
    """They are loaded with each page."""
    folder = resources.files("sidelight.exporter.html") / "assets"
    assert sum(len((folder / name).read_bytes()) for name in (*SCRIPTS, *STYLES)) < 30_000


def test_every_field_of_the_result_is_explained():
    """Each name of `result.json` stands on docs/reference/result.md in backticks, alone or as a member of a path."""
    page = (Path(__file__).parents[3] / "docs/reference/result.md").read_text(encoding="utf-8")
    structs = msgspec.json.schema(StudyResult)["$defs"]
    names = {name for struct in structs.values() for name in struct["properties"]}
    assert set() == names - {name for path in re.findall(r"`([\w.\[\]]+)`", page) for name in re.split(r"\W+", path)}


def test_the_minimum_report_has_intervals_where_there_are_some():
    """Of latencies, too, and before the load at which they were measured."""
    known = result()
    at = {"ttft_p50_ms": msgspec.structs.replace(quantity(43.27, "ms", 41.02, 45.81), at="4.72 requests/s offered")}
    lines = files(msgspec.structs.replace(known, results=known.results | at))["report-minimum.txt"].splitlines()
    assert "- TTFT P50: 43.3 ms (41.0 to 45.8, 95 %; at 4.72 requests/s offered)" in lines
