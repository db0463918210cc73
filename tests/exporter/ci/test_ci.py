"""Results for pipelines: a comment that renders as it is meant to, and test cases that another's parser reads."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import msgspec
import pytest
import summaries
from hypothesis import example, given
from hypothesis import strategies as st

from sidelight.exporter.ci.junit import ANSWERED, ENDED, TRUST, as_junit
from sidelight.exporter.ci.markdown import as_markdown
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.rates import Outage
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult

ATTACK = "a|b <img src=x> [x](http://y) **c**\x1b[2J\x00"
# What GitHub and GitLab make links of without any markup, and mentions that send mail.
LINKS = "@team #12 !12 org/repo#12 GH-12 a@b.example www.b.example https://b.example"


def summary(*met: bool | None, **changes: Any) -> Summary:
    """A run with an objective for each of these verdicts."""
    objectives = [
        ObjectiveResult(
            text=f"ttft_p{90 + place}<1ms", metric="ttft", statistic=f"p{90 + place}", unit="ms", bound=1.0,
            value=None if verdict is None else 24.0, bound_ms=1.0, value_ms=None, count=4, requests=4,
            failed_requests=0, left_out_requests=0, met=verdict,
            missing=None if verdict is not None else "nothing was measured",
        )
        for place, verdict in enumerate(met)
    ]  # fmt: skip
    slo = SloResult(text="", met=all(met), good_requests=0, undetermined_requests=0, objectives=objectives)
    client = msgspec.structs.replace(summaries.client(), slo=slo if met else None)
    whole = summaries.summary(summaries.correlated())
    return msgspec.structs.replace(whole, client=client, **changes)


def cases(of: Summary) -> dict[str, tuple[str, str]]:
    """Return the outcome and the message of each test case, by name, as a parser of JUnit files reads them."""
    suite = ET.fromstring(as_junit(of).encode()).find("testsuite")  # noqa: S314  we wrote it
    assert suite is not None
    read = {}
    for case in suite.findall("testcase"):
        (result,) = case
        read[case.attrib["name"]] = result.tag, result.attrib.get("message", result.text or "")
    counts = [sum(tag == kind for tag, _ in read.values()) for kind in ("failure", "error", "skipped")]
    assert [len(read), *counts] == [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
    return read


def test_each_objective_is_a_case_and_so_is_trust():
    """Met, missed and without a value; the evidence stands with each."""
    read = cases(summary(True, False, None))
    assert {
        ENDED: ("system-out", "the run is complete"),
        ANSWERED: ("system-out", "100 of 100 requests ended ok"),
        "ttft_p90<1ms": ("system-out", "24.0 ms over 4 requests"),
        "ttft_p91<1ms": ("failure", "24.0 ms over 4 requests"),
        "ttft_p92<1ms": ("skipped", "nothing was measured"),
    } == {name: result for name, result in read.items() if name != TRUST}
    assert read[TRUST][0] == "system-out"


def test_a_run_that_was_cut_short_is_an_error():
    """And distrust skips its case: the exit code is the same with and without it."""
    doubted = msgspec.structs.replace(
        summary().self_check, trusted=False, first_line="TTFT may be wrong by up to 40 ms"
    )
    read = cases(summary(status="crashed", self_check=doubted))
    del read[ANSWERED]
    assert {ENDED: ("error", "the run is crashed"), TRUST: ("skipped", "TTFT may be wrong by up to 40 ms")} == read


def test_a_server_that_stopped_answering_is_an_error():
    """A green file for a server that died half-way would pass what it never did."""
    whole = summary()
    client = msgspec.structs.replace(whole.client, outage=Outage(at_s=2.0, at_ns=2 * 10**9, errors={"connect": 9}))
    tag, message = cases(msgspec.structs.replace(whole, client=client))[ANSWERED]
    assert ("error", True) == (tag, "2.0 s into the load" in message)


@given(st.text())
@example("\ufffe\uffff")
def test_whatever_a_server_said_the_file_is_xml(text: str):
    """Controls, brackets and halves of characters."""
    assert cases(summary(run_id=text or "x")) != {}


def test_the_comment_has_the_conclusion_the_objectives_and_the_tables():
    """The verdict first, then the answer; bars of characters are left out of tables."""
    text = as_markdown(summary(False, True))
    lines = text.splitlines()
    at = lines.index("**1 of 2 objectives met**")
    assert [True, True] == [lines[at - 4].startswith("Why: "), lines[at - 2].startswith("**Do this: ")]
    assert lines[at : at + 6] == [
        "**1 of 2 objectives met**",
        "",
        "| objective |  | measured |",
        "| --- | --- | --- |",
        "| ttft\\_p90\\<1ms | **missed** | 24.0 ms over 4 requests |",
        "| ttft\\_p91\\<1ms | met | 24.0 ms over 4 requests |",
    ]
    assert lines[at + 7].startswith("- ! The load generator was slow")
    assert "| queue | 150.0 | 150.0 | 150.0 | 75 % | engine spans |" in lines
    assert not [line for line in lines if line.startswith("|") and "█" in line]
    heads = [at for at, line in enumerate(lines) if line.startswith("| ---")]
    assert all(lines[at].count(" | ") == lines[at + 1].count(" | ") for at in heads)


@pytest.mark.parametrize("field", ["model", "url"])
def test_what_servers_said_is_no_markup(field: str):
    """Neither a cell's end, HTML, a link nor a control."""
    of = summary()
    text = as_markdown(msgspec.structs.replace(of, config={**of.config, field: ATTACK}, warnings=[ATTACK]))
    assert "a\\|b \\<img src=x\\> \\[x\\](http\\://y) \\*\\*c\\*\\*\\\\x1b\\[2J\\\\x00" in text
    assert "<img" not in text.replace("\\<img", "")


@pytest.mark.parametrize("field", ["model", "url"])
def test_what_servers_said_links_to_nothing(field: str):
    """Neither a mention, a reference nor an address; and the last line begins with words of ours, so with no list."""
    of = summary()
    text = as_markdown(msgspec.structs.replace(of, config={**of.config, field: LINKS}, warnings=[LINKS]))
    assert re.findall(r"[@#!]\w|GH-\d|(?<!\\):/|www\.", text) == []
    assert text.count("GH-\N{ZERO WIDTH SPACE}12") == 2
    assert text.splitlines()[-1].startswith("sidelight ")


def test_the_comment_is_never_too_long():
    """GitHub refuses one of more than 65,536 characters, so that of a long text its beginning is shown."""
    of = summary()
    text = as_markdown(msgspec.structs.replace(of, config={**of.config, "model": "m" * 10**6}, warnings=["w " * 10**6]))
    assert "w " * 450 in text
    assert len(text) < 2**13
