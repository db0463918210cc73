"""`report.html`: one file that connects to nothing, whose tables are the report's and stand without its script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from golden_files import GOLDEN, names
from html_page import ATTACK, Page
from packed_columns import read

from sidelight.correlator.opening import open_run
from sidelight.correlator.parts import LABELS
from sidelight.exporter.document import BARS, Prose, table, words
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.html.data import PageInputs
from sidelight.exporter.html.markup import blocks
from sidelight.exporter.html.page import LIVE_SCRIPTS, SCRIPTS, STYLES, as_html
from sidelight.exporter.html.terms import title_of
from sidelight.exporter.report.sections import as_text
from sidelight.exporter.report.verdict import verdict_blocks, verdict_of
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.numbers import ms, spoken
from sidelight.sidecar.report.derive import derive_run


def derived(name: str, tmp_path: Path, **manifest: Any) -> Evaluated:
    """Return a recorded run, derived with its page."""
    path = tmp_path / name
    shutil.copytree(GOLDEN / name, path, ignore=shutil.ignore_patterns("expected"))
    if manifest:
        whole = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        whole["config"] |= manifest
        (path / "manifest.json").write_text(json.dumps(whole), encoding="utf-8")
    return derive_run(open_run(path), ["html"])


def page_of(run: Evaluated) -> Page:
    return Page((run.run.path / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", names())
def test_the_page_allows_its_own_script_and_styles_and_no_connection(name: str, tmp_path: Path):
    """By their hashes; nothing in it refers to another file, and no attribute holds a script."""
    page = page_of(derived(name, tmp_path))
    policy = next(attrs["content"] or "" for tag, attrs in page.elements if "http-equiv" in attrs)
    data, script = page.contents["script"]
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (page.contents["style"][0], script)
    ]
    assert f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}';" in policy
    attributes = {name for _, attrs in page.elements for name in attrs}
    assert not {name for name in attributes if name in ("src", "href", "style") or name.startswith("on")}
    json.loads(data)


def test_the_page_says_what_is_missing_without_a_script(tmp_path: Path):
    """Charts, but no table."""
    page = page_of(derived("vllm_spans", tmp_path))
    assert "noscript" in {tag for tag, _ in page.elements}
    assert any("need JavaScript" in text for text in page.contents["p"])


def test_every_request_is_in_the_page_with_its_parts(tmp_path: Path):
    """In the order of submission, to a hundredth of a millisecond, warm-up included."""
    run = derived("vllm_spans", tmp_path)
    columns = read(json.loads(page_of(run).contents["script"][0])["requests"])
    log, parts = run.run.requests, run.parts
    assert len(log) == len(columns["sent"])
    assert columns["sent"] == sorted(columns["sent"])
    assert sorted(columns["queue"]) == pytest.approx(sorted(1e3 * parts.queue_s), abs=0.006)
    assert sorted(columns["index"]) == sorted(log.index.tolist())


@pytest.mark.parametrize("engines", [("a", "b"), ("a", "a")])
def test_the_page_has_what_is_known_of_engines_and_caches(engines: tuple[str, ...], tmp_path: Path):
    """Of one engine not which served; of requests of which no tokens are known no column."""
    run = derived("vllm_spans", tmp_path)
    rows, reuse = np.arange(len(run.run.requests)), run.reuse.requests
    reuse = reuse._replace(served_by=np.array(engines, dtype=object)[rows % 2], evicted_tokens=rows.astype(float))
    recorded = PageInputs(requests=run.run.requests, parts=run.parts, reuse=reuse, endpoints=(), phases=())
    columns = json.loads(Page(as_html(run.summary, recorded)).contents["script"][0])["requests"]
    read_columns = read(columns)
    assert ("engine" in read_columns) == (engines == ("a", "b"))
    assert ["· evicted"] == [name for name in read_columns if name.startswith("·")]
    assert read_columns["· evicted"] == sorted(rows)


def test_what_servers_said_stays_text(tmp_path: Path):
    """A model, a class and an error that would be elements: the page has the same elements as without them."""
    run = derived("vllm_plain", tmp_path, model=ATTACK)
    attacked = msgspec.to_builtins(run.summary)
    attacked["warnings"] = [*attacked["warnings"], ATTACK]
    requests = run.run.requests
    requests.workload_class[:], requests.error[0] = ATTACK, ATTACK
    recorded = PageInputs(
        requests=requests, parts=run.parts, reuse=run.reuse.requests, endpoints=run.run.endpoints, phases=()
    )
    text = as_html(msgspec.convert(attacked, Summary), recorded, trace_url=f"https://t/{ATTACK}{{trace_id}}")
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.elements}
    columns = {column["name"]: column for column in json.loads(page.contents["script"][0])["requests"]["columns"]}
    assert columns["class"]["texts"] == [ATTACK]
    assert any(ATTACK in paragraph for paragraph in page.contents["p"])
    assert text.count("</script") == 2


def test_what_servers_state_beyond_any_chart_costs_no_page(tmp_path: Path):
    """Tokens of a reply, a gauge and a percentile as a broken server may have them; they are not drawn."""
    run = derived("vllm_plain", tmp_path)
    stated = msgspec.to_builtins(run.summary)
    stated["server"]["ttft"]["stats"]["p99"] = 1e307
    stated["server"]["ttft"]["intervals"]["p99"] = {"low": 1e306, "high": 2e307}
    stated["server"]["ttft"].pop("unresolved", None)
    run.run.requests.output_tokens[0] = 2**53
    run.run.endpoints[0].values[:] = 1.8446744073709552e19
    endpoints = run.run.endpoints
    recorded = PageInputs(
        requests=run.run.requests, parts=run.parts, reuse=run.reuse.requests, endpoints=endpoints, phases=()
    )
    data = json.loads(Page(as_html(msgspec.convert(stated, Summary), recorded)).contents["script"][0])
    assert "p99" not in data["engine"].get("ttft", {})
    assert sum(np.isnan(read(data["requests"])["output"])) == 1 + sum(run.run.requests.output_tokens < 0)


def test_prompts_and_replies_are_not_in_the_page(tmp_path: Path):
    """No text of a reply is, nor a header or a body of a request."""
    run = derived("vllm_spans", tmp_path)
    data = json.loads(page_of(run).contents["script"][0])
    texts = {column["name"] for column in data["requests"]["columns"] if "texts" in column}
    ids = {"request_id", "trace_id"}  # of a run of an earlier version they cannot be derived
    known = {"phase", "class", "address", "status", "message", "finish", "source", "quality", "merged", "reason"}
    assert texts - ids == known


def test_the_same_run_gives_the_same_page(tmp_path: Path):
    """Byte for byte, wherever it lies."""
    pages = [(derived("two_engines", tmp_path / place).run.path / "report.html").read_bytes() for place in ("a", "b")]
    assert pages[0] == pages[1]


def test_the_page_says_how_sure_its_answer_is(tmp_path: Path):
    """Folded behind the answer, once: what it rests on, and whether the load generator can be trusted."""
    run = derived("vllm_spans", tmp_path)
    check, page = run.summary.self_check, page_of(run)
    paragraphs = page.contents["p"]
    answer = next(at for at, text in enumerate(paragraphs) if text.startswith("Why: "))
    end = next(at for at, text in enumerate(paragraphs) if text.startswith("Latencies are as the client saw them"))
    between = " ".join(paragraphs[answer:end])
    assert 1 == " ".join(paragraphs).count("matched to engine spans") == between.count("matched to engine spans")
    assert not check.trusted
    assert "not to be trusted with TTFT and gaps between chunks (see the line with !)." in between
    busy = "The engine ran on this machine, which was 96 % busy"
    assert " ".join(paragraphs).count(busy) == 1
    elsewhere = msgspec.structs.replace(run.summary, config=run.summary.config | {"url": ["http://10.0.0.1:8000"]})
    assert busy not in as_text(elsewhere)
    late = next(row for row in page.rows if row[0] == "requests left after their time, ms")
    assert check.arrivals is not None
    assert late[2:4] == [ms(check.arrivals.late_ms.p99), ms(check.arrivals.late_ms.max)]
    assert f"Requests left up to {late[2]} ms after" in " ".join(paragraphs)


def test_percentiles_of_charts_are_those_of_the_summary(tmp_path: Path):
    """Not of the rounded columns, of which the last digit may be another."""
    run = derived("vllm_spans", tmp_path)
    data = json.loads(page_of(run).contents["script"][0])
    client, breakdown = run.summary.client, run.summary.correlation.breakdown
    for name, times in {"ttft": client.ttft_ms, "e2e": client.e2e_ms, "queue": breakdown.queue_ms}.items():
        shown = data["percentiles"][name]
        assert [shown["count"], *(shown[label][0] for label in ("p50", "p90", "p99"))] == [
            times.count, times.p50, times.p90, times.p99,
        ]  # fmt: skip
        interval = run.summary.methodology.percentiles[f"{name}_ms"].p99
        assert shown["p99"][1:] == [interval.low, interval.high, interval.needed_n]


def test_the_page_says_how_sure_percentiles_are(tmp_path: Path):
    """In a sentence, and in the table behind the charts; what too few requests cannot say is not made up."""
    run = derived("vllm_spans", tmp_path)
    page, ttft = page_of(run), run.summary.methodology.percentiles["ttft_ms"]
    assert any(f"p99 at least {spoken(ttft.p99.low)}" in text for text in page.contents["p"])
    row = next(row for row in page.rows if row[0] == "TTFT" and "?" in row[-1])
    assert ttft.p50.low is None
    assert row[1:3] == [ms(ttft.p50.estimate), "? - ?"]


def test_the_pages_own_script_and_styles_stay_small():
    """Under 1,200 lines, and 60 kB of a report or 65 of the live page, beside uPlot: they are loaded with the page."""
    folder = resources.files("sidelight.exporter.html") / "assets"
    for scripts, most in ((SCRIPTS, 60_000), (LIVE_SCRIPTS, 65_000)):
        names = [name for name in (*scripts, *STYLES) if not name.startswith("uplot")]
        texts = [(folder / name).read_text(encoding="utf-8") for name in names]
        assert sum(text.count("\n") for text in texts) < 1_200
        assert sum(len(text.encode()) for text in texts) < most


def test_the_kv_cache_is_in_percent_in_every_table(tmp_path: Path):
    """By time as over the whole run."""
    rows = page_of(derived("vllm_spans", tmp_path)).rows
    column = next(row for row in rows if "KV cache usage" in row[1:]).index("KV cache usage")
    by_time = [row[column] for row in rows if row[0].startswith("from ")]
    assert by_time
    assert all(text == "-" or text.endswith(" %") for text in by_time)


def test_the_first_screen_is_figures_and_a_bar(tmp_path: Path):
    """Then why, and what to do; the parts of the bar make up the whole, and one within its own error is pale."""
    run = derived("vllm_spans", tmp_path)
    whole = (run.run.path / "report.html").read_text(encoding="utf-8")
    block = (">TTFT p50</dt>", '<svg class="parts"', "Why: ", "Do this: ")
    folded = ("How far these numbers can be trusted", "Latencies are as the client saw them")
    charts = (f'<section id="{name}">' for name in ("time", "requests", "spread", "parts"))
    places = [whole.index(text) for text in (*block, *folded, *charts)]
    assert places == sorted(places)
    widths = re.findall(r'<rect x="[\d.]+%" width="([\d.]+)%"', whole)
    assert sum(map(float, widths)) == pytest.approx(100, abs=0.1)
    queue = run.summary.correlation.breakdown.queue_ms
    unsure = msgspec.structs.replace(queue, error_ms=2 * (queue.mean or 0.0))
    breakdown = msgspec.structs.replace(run.summary.correlation.breakdown, queue_ms=unsure)
    replace = msgspec.structs.replace
    verdict = verdict_of(replace(run.summary, correlation=replace(run.summary.correlation, breakdown=breakdown)))
    shown = blocks(verdict_blocks(verdict))
    assert 2 == shown.count("within its own error")
    assert shown.count("opacity") == 2


def test_words_of_a_table_are_explained_and_backticks_are_code(tmp_path: Path):
    whole = (derived("vllm_spans", tmp_path).run.path / "report.html").read_text(encoding="utf-8")
    sections = whole[: whole.index("<script")]
    assert re.search(r'<th scope="row" title="[^"]+">other</th>', sections)
    assert "`" not in sections[sections.index("<main>") :]


@pytest.mark.parametrize(
    "label", [*LABELS.values(), "rest outside the engine", "network and gateway", "gateway, inbound"]
)
def test_every_part_has_a_meaning(label: str):
    """Also with its share or statistics behind it, in the text of a legend or below another part in a request's box."""
    assert title_of(label)
    assert {title_of(label)} == {title_of(f"{label}\N{NO-BREAK SPACE}75 %"), title_of(f"·· or: {label}, ms")}


def test_the_longest_term_that_a_label_begins_with_says_what_it_means():
    """In any case of letters, and nowhere else in the label."""
    assert title_of("KV cache usage") == title_of("KV cache") != ""
    assert title_of("TTFT P99 (ms)") == title_of("TTFT p99") != title_of("TTFT p90") == title_of("TTFT")
    assert "" == title_of("look at the queue") == title_of("constructor") == title_of("")


def test_a_cell_has_its_code_and_what_its_word_means():
    """As a heading of a row has; an option is in one piece, in cells and in sentences."""
    shown = table("Levels", map(words, ("Limit", "Meaning")), [("1", "seats", "As `--slo` of `run`.")])
    whole = blocks([shown, Prose("! --resume tries it again. A range 1--2.", "alarm")])
    assert re.search('<td[^>]* title="[^"]+">seats</td>', whole)
    assert "As <code>--slo</code> of <code>run</code>.</td>" in whole
    assert '<span class="number">--resume</span> tries' in whole
    assert "1--2" in whole


def test_bars_are_drawn_where_no_charts_are():
    """A column of words is none, whatever its characters."""
    whole = Page(blocks([table("T", [BARS, words("")], [("queue", 0.5, "██")])]))
    assert [["queue", "██"]] == whole.rows[1:]


def test_a_number_keeps_its_unit_on_its_line(tmp_path: Path):
    """As in a terminal: a browser breaks at any space that may break."""
    whole = (derived("vllm_spans", tmp_path).run.path / "report.html").read_text(encoding="utf-8")
    paragraphs = re.findall("<p.*?</p>", whole[: whole.index('<section id="about"')])
    assert any(re.search("\\d\N{NO-BREAK SPACE}%", text) for text in paragraphs)
    assert not any(re.search(r"\d %", text) for text in paragraphs)
