"""What a run says of the spans that it received."""

from __future__ import annotations

import re

import pytest

from sidelight.scraper.spans.log import ReceiverCounts
from sidelight.sidecar.run.phases import _span_notes

LISTENING = "127.0.0.1:4317"


RUST = "0.33.0 (Rust frontend 0.3.1)"
OLD_RUST = "0.32.0 (Rust frontend 0.32.0)"


def notes(counts: ReceiverCounts, engines: set[str], version: str = "") -> list[str]:
    named = {name: getattr(counts, name) for name in ReceiverCounts.__struct_fields__}
    return list(_span_notes(named, LISTENING, engines, version))


@pytest.mark.parametrize(
    ("engines", "switch"),
    [
        ({"vllm"}, "vLLM: --otlp-traces-endpoint http://HOST:4317"),
        ({"trtllm", "vllm"}, "TensorRT-LLM: --otlp_traces_endpoint URL and return_perf_metrics: true; vLLM: --otlp-"),
        (set(), "docs/reference/engines.md tells how"),
    ],
    ids=["vllm", "two", "none"],
)
def test_the_switch_of_the_engines_found_is_named_where_no_span_came(engines: set[str], switch: str):
    """And the address to which they are to be sent."""
    (text,) = notes(ReceiverCounts(), engines)
    assert text.startswith(
        "no span was received at 127.0.0.1:4317, so no times come from spans; switch tracing on in the "
    )
    assert switch in text


@pytest.mark.parametrize(
    ("engine", "version", "way"),
    [
        (
            "vllm",
            RUST,
            f"vLLM {re.escape(RUST)} sends no spans; its response field .*: --enable-per-request-metrics$",
        ),
        ("vllm", OLD_RUST, f"vLLM {re.escape(OLD_RUST)} sends no spans; its histogram sums .*: on by default$"),
        ("llamacpp", "", "llama.cpp sends no spans; its object timings of the last chunk give .*: always on$"),
    ],
)
def test_an_engine_that_sends_no_spans_has_another_way(engine: str, version: str, way: str):
    """Nothing is advised that it does not know: vLLM's Rust frontend does not start with the switch for spans."""
    (text,) = notes(ReceiverCounts(), {engine}, version)
    assert re.search(f"so no times come from spans: {way}", text)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (ReceiverCounts(turned_away=6, unwritten=6), "6 not written to the disk"),
        (
            ReceiverCounts(turned_away=3, unwritten=1, unauthorized=2),
            "2 turned away, 2 unauthorized, 1 not written to the disk",
        ),
        (ReceiverCounts(no_memory=4), "4 beyond the memory limit"),
    ],
    ids=["disk", "mixed", "memory"],
)
def test_tracing_is_not_to_be_switched_on_where_all_exports_were_refused(counts: ReceiverCounts, why: str):
    """It is on; what keeps spans out is the reason that is said."""
    (text,) = notes(counts, {"vllm"})
    nothing = "no span was received at 127.0.0.1:4317, so no times come from spans"
    assert f"{nothing}: exports came and were refused ({why}); raw/receiver.stderr says why" == text


def test_spans_that_were_refused_are_a_note():
    """By kind; where all was well there is nothing to say."""
    assert [] == notes(ReceiverCounts(exports=2, spans=9, forwarded=2), {"vllm"})
    assert [
        "exports of spans were refused (3 malformed, 1 too large, 2 incomplete); raw/receiver.stderr says why",
        "4 of 9 spans violate the OTLP specification and are not used; raw/receiver.stderr names them",
        (
            "2 of 9 spans are timed by a clock more than 10 minutes off ours and are not used; raw/receiver.stderr "
            "names it"
        ),
    ] == notes(
        ReceiverCounts(exports=2, spans=9, bad_spans=4, off_clock=2, malformed=3, too_large=1, incomplete=2), {"vllm"}
    )
