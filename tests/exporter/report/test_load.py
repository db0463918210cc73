"""What the report says of a load: overload before anything else, three rates, and whether it was sustained."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import summaries
from logs import request_log
from queues import loaded

from sidelight.correlator.load.steady import steady_throughput
from sidelight.correlator.load.sustained import stability_of
from sidelight.exporter.comparison import runs_table
from sidelight.exporter.report.load import overload, rate_lines, served_in_load, sustained
from sidelight.exporter.report.sections import as_text
from sidelight.exporter.report.verdict import verdict_of
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.rates import HeldBack
from sidelight.loadgen.requests.summary import client_summary
from sidelight.rundir.printable.numbers import cell
from sidelight.rundir.stats import describe


def loaded_run(load: float, *, seconds: float, per_s: float = 6.0, servers: int = 16, steady: bool = False) -> Summary:
    """The summary of a run against a queue."""
    queue = loaded(load, seconds=seconds, per_s=per_s, servers=servers)
    log = request_log(
        *(
            {"scheduled": 1e3 * a, "dispatch": 1e3 * a, "submit": 1e3 * a, "end": 1e3 * e}
            for a, e in zip(queue.arrived_s, queue.ended_s, strict=True)
        )
    )
    whole = summaries.summary(summaries.correlated())
    stability = stability_of(log, [], closed_loop=False)
    methodology = msgspec.structs.replace(whole.methodology, stability=stability)
    client = msgspec.structs.replace(client_summary(log), steady=steady_throughput(log, 0) if steady else None)
    return msgspec.structs.replace(whole, client=client, methodology=methodology)


def words(text: str) -> str:
    return " ".join(text.split())


def test_an_overloaded_run_says_so_before_anything_else():
    """What was left open, what that makes of latencies, what was offered, and what was served meanwhile."""
    verdict = verdict_of(loaded_run(2.0, seconds=60))
    assert verdict.state == "overloaded"
    assert verdict.headline == (
        "Overloaded: 407 of 743 requests were still open when the load ended, after 59.9 s; the longer a run, the "
        "longer its latencies."
    )
    assert verdict.figures[0].text == "5.81 of 12.4 requests/s"


def test_an_overload_in_which_nothing_ended_gives_the_rate_of_the_drain():
    """As of a real engine that was offered seven times what it could serve, for ten seconds."""
    verdict = verdict_of(loaded_run(4.8 / 0.7, seconds=10, per_s=0.7, servers=16))
    assert re.match(r"0 of 4\.\d+ requests/s, 0\.\d+ once it ended", verdict.figures[0].text)
    assert "46 of 46 requests were still open" in verdict.headline


def test_an_overload_that_a_cap_held_back_is_no_matter_of_latencies():
    """What waited waited for the cap, and the TTFT does not include that."""
    run = loaded_run(2.0, seconds=60)
    held_ms = describe([500.0, 31_000.0], "")
    held_back = HeldBack(cap=16, requests=350, held_ms=held_ms, not_sent=40)
    (line,) = overload(msgspec.structs.replace(run, client=msgspec.structs.replace(run.client, held_back=held_back)))
    assert line == (
        "Overloaded: with at most 16 in flight, requests were held back ever longer, up to 31.0 s, and 40 were not "
        "sent; TTFT does not include that wait."
    )


def test_a_run_that_was_sustained_says_nothing_of_overload():
    """It says why that is thought, among what the numbers rest on."""
    run = loaded_run(0.5, seconds=120)
    assert list(overload(run)) == []
    assert sustained(run).startswith("The load was sustained: requests in flight did not rise")
    assert "The load was sustained: " in words(as_text(run))


@pytest.mark.parametrize(
    ("verdict", "head"),
    [
        ("growing", "The load was not sustained: why."),
        ("undecided", "Whether the load was sustained is not decided: why."),
        (None, "Whether the load was sustained is not judged: why."),
    ],
)
def test_each_verdict_has_its_words(verdict: str | None, head: str):
    """With the reason that the summary has."""
    run = loaded_run(0.5, seconds=30)
    stability = msgspec.structs.replace(run.methodology.stability, verdict=verdict, reason="why")
    methodology = msgspec.structs.replace(run.methodology, stability=stability)
    assert sustained(msgspec.structs.replace(run, methodology=methodology)) == head


def test_throughput_is_called_what_it_is():
    """What was sent and served while the load lasted, then what counts the drain in, which is named."""
    load, throughput = rate_lines(asked_for(12.4, loaded_run(2.0, seconds=60)))
    assert load.startswith(
        "Requests/s in the 59.9 s of load, first to last sent: 12.4 offered, 12.4 sent, 5.81 served (without the "
    )
    assert throughput.startswith("Throughput including 69.1 s of drain: 5.76 requests/s")


def test_a_short_run_of_a_system_that_served_all_says_so():
    """Its requests took about as long as the load: none can be counted behind a ramp, and the drain halves the rest."""
    run = loaded_run(0.5, seconds=8, per_s=1.0)
    rates = run.client.rates
    assert rates.served_requests_per_s is None
    assert rates.completed_requests_per_s == rates.realised_requests_per_s
    sent = cell(rates.realised_requests_per_s)
    load, throughput = rate_lines(asked_for(rates.offered_requests_per_s or 0.0, run))
    assert load == (
        f"Requests/s in the {cell(rates.load_s)} s of load, first to last sent: {sent} offered, {sent} sent, "
        f"all served in the end, the last {cell(rates.drain_s)} s after the load"
    )
    assert throughput.startswith(f"Throughput including {cell(rates.drain_s)} s of drain: ")


def test_a_rate_of_a_few_that_ended_is_not_shown_as_what_a_system_serves():
    """Where all succeeded in the end, what was sent was served; of many, the rate while the load lasted."""
    few, many = loaded_run(0.3, seconds=20, per_s=3.0), loaded_run(0.5, seconds=120)
    assert few.client.rates.served_requests_per_s is not None
    assert " all served in the end, the last " in next(rate_lines(few))
    assert f" {cell(many.client.rates.served_requests_per_s)} served (without the first " in next(rate_lines(many))


def test_arrivals_that_came_to_another_rate_than_was_asked_for_are_named():
    """As 203 in a minute where four a second were asked for."""
    run = loaded_run(0.5, seconds=60)
    offered = run.client.rates.offered_requests_per_s or 0.0
    assert 2 == len(list(rate_lines(asked_for(1.04 * offered, run))))
    load, chance, _ = rate_lines(asked_for(1.2 * offered, run))
    asked = cell(1.2 * offered)
    assert f"first to last sent: {cell(offered)} offered (--rate {asked}), {cell(offered)} sent" in load
    assert chance.startswith(f"The arrivals that were drawn at random for {asked} requests/s came to {cell(offered)}: ")


def asked_for(rate: float, run: Summary) -> Summary:
    return msgspec.structs.replace(run, config=run.config | {"rate": rate})


def test_a_run_without_rates_has_one_line():
    """Of a single request."""
    client = client_summary(request_log({"dispatch": 0, "submit": 0, "end": 100}))
    assert 1 == len(list(rate_lines(msgspec.structs.replace(summaries.summary(summaries.correlated()), client=client))))


def test_few_requests_say_no_rate_in_any_view():
    """The report has none of a short run, nor has it beside others."""
    few, many = loaded_run(0.5, seconds=60, per_s=1.0, servers=2), loaded_run(0.5, seconds=60)
    assert few.client.rates.served_requests_per_s is not None
    assert served_in_load(few) is None
    assert served_in_load(many) == many.client.rates.served_requests_per_s
    runs: Any = [SimpleNamespace(label="A", name="a", summary=few), SimpleNamespace(label="B", name="b", summary=many)]
    assert list(runs_table(runs).rows[7].cells) == ["requests/s served", "-", cell(served_in_load(many))]


def test_the_steady_throughput_stands_below_that_of_the_whole_run():
    """With its intervals; a load of a few requests has none."""
    run = loaded_run(0.5, seconds=300, steady=True)
    lines = list(rate_lines(run))
    assert re.search(
        r"^Without the first tenth of the load and without the drain: (2\.[89]|3\.[01])\d requests/s "
        r"\(95 % interval [\d.]+ to [\d.]+\)$",
        lines[-1],
    )
    assert lines[-2].startswith("Throughput including")
    assert "Without the first tenth" not in " ".join(rate_lines(loaded_run(0.5, seconds=5, steady=True)))
