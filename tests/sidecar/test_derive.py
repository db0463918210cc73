from __future__ import annotations

import zlib
from array import array
from pathlib import Path

from loadgen.log import assemble
from loadgen.records import PlannedRequest, RequestPart
from sidecar.derive import window_of
from sidecar.run import Event, Run

SECOND = 10**9
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
BODY = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


def planned(index: int) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        phase="measure",
        workload_class="c",
        path="/v1/completions",
        body=b"",
        input_tokens=1,
        max_tokens=1,
        offset_ns=0,
    )


def part(index: int, *, sent_s: float, ended_s: float, error: str = "") -> RequestPart:
    """Return a whole reply, or one that hung until it was given up."""
    sent_ns, ended_ns = int(sent_s * SECOND), int(ended_s * SECOND)
    body = b"" if error else BODY
    return RequestPart(
        index=index,
        seq=0,
        last=True,
        worker=0,
        url="u",
        scheduled_ns=sent_ns,
        dispatch_ns=sent_ns,
        connected_ns=sent_ns,
        submit_ns=sent_ns,
        reused=False,
        status=0 if error else 200,
        head=b"" if error else HEAD,
        reads_ns=array("q", [ended_ns] if body else []).tobytes(),
        read_ends=array("q", [len(body)] if body else []).tobytes(),
        body=zlib.compress(body) if body else b"",
        end_ns=ended_ns,
        error=error,
    )


def run_of(*parts: RequestPart, status: str = "complete", phase_end_s: float = 30) -> Run:
    """Return a run measured from 1 s on."""
    marks = (("phase_start", 1), ("phase_end", phase_end_s))
    return Run(
        path=Path(),
        manifest={"status": status, "started_ns": 0},
        requests=assemble([planned(one.index) for one in parts], parts, run_id="r"),
        worker_stats=(),
        endpoints=(),
        events=tuple(Event(at_ns=int(at * SECOND), name=name, data={"phase": "measure"}) for name, at in marks),
    )


def test_a_request_that_hung_does_not_stretch_the_window():
    """Throughput is over the time in which the engine answered, not over the wait for what never came."""
    run = run_of(
        part(0, sent_s=1, ended_s=3),
        part(1, sent_s=2, ended_s=4),
        part(2, sent_s=2, ended_s=19, error="cancelled: the drain bound was reached"),
    )

    assert (1 * SECOND, 4 * SECOND) == (window_of(run).start_ns, window_of(run).end_ns)


def test_a_submission_is_within_the_window_whatever_became_of_it():
    """An engine that died early does not make the load shorter."""
    run = run_of(part(0, sent_s=1, ended_s=2), part(1, sent_s=9, ended_s=10, error="connect: refused"))

    assert 9 * SECOND == window_of(run).end_ns


def test_a_run_that_the_user_stopped_was_measured_until_then():
    run = run_of(part(0, sent_s=1, ended_s=2), status="interrupted", phase_end_s=7)

    assert 7 * SECOND == window_of(run).end_ns


def test_a_run_that_never_came_to_measuring_has_an_empty_window():
    run = run_of()
    unmeasured = Run(
        path=run.path,
        manifest={"started_ns": 5},
        requests=run.requests,
        worker_stats=(),
        endpoints=(),
        events=(),
    )

    assert (5, 5) == (window_of(unmeasured).start_ns, window_of(unmeasured).end_ns)
