"""The slowest requests one by one: their parts, load and the engine's work beside them.

Objects of `summary.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from msgspec import Struct, UnsetType

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.exact.table import Joined
from sidelight.correlator.exact.work import (
    LEAST_COVERAGE,
    EngineStretches,
    Stays,
    stays_of,
    stretches_of,
    used_by_groups,
    used_while_waiting,
)
from sidelight.correlator.load.reuse import REUSED
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.summary.breakdown import json_name, with_fields
from sidelight.loadgen.requests.metrics import input_tokens, stamped_ms
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir import fields
from sidelight.rundir.columns import Floats, Texts
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Ratio, doc
from sidelight.rundir.stats import Missing, finite
from sidelight.scraper.spans.requests import EngineSpans

MOST = 5
MOST_USERS, MOST_CLASSES = 3, 8

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
UsedMs = Annotated[Amount, doc("Time of the wait that it used.", "ms")]
UsedRatio = Annotated[Ratio, doc("used_ms over the wait.", NO_UNIT)]
Tokens = Annotated[Amount | UnsetType | None, doc("Of its prompt; absent where known of no request.", "tokens")]
PartMs = Annotated[float | None, doc("Of its TTFT; null where it is not known.", "ms")]


@with_fields(dict.fromkeys(map(json_name, TTFT_PARTS), PartMs), after="ttft_ms")
@with_fields(dict.fromkeys(("cached_tokens", *REUSED), Tokens), after="in_flight", default=UNSET)
class SlowRequest(Struct, frozen=True, kw_only=True):
    """One request: its ids, its TTFT in parts, and what ran beside it as it was submitted."""

    request_id: Annotated[str, doc("Its X-Request-Id.")]
    trace_id: Annotated[str, doc("Its W3C trace id.")]
    workload_class: Annotated[str, doc("Its workload class.")]
    endpoint_url: Annotated[str, doc("The URL that was asked.")]
    status: Annotated[str, doc("What became of it.")]
    submitted_s: Annotated[float, doc("Its submission after the start of the window.", "s")]
    ttft_ms: Annotated[float, doc("Its time to first token.", "ms")]
    source: Annotated[str, doc("Where its parts are from: trace, response, histogram or none.")]
    error_ms: Annotated[Amount | None, doc("Standard error of the least certain part; null without a source.", "ms")]
    input_tokens: Annotated[int | None, doc("Its input tokens by the server's usage, else by the tokenizer.", "tokens")]
    requests_waiting: Annotated[
        float | None, doc("Requests waiting in the engine as it was submitted; null where not known.", "requests")
    ]
    requests_running: Annotated[
        float | None, doc("Requests running in the engine as it was submitted; null where not known.", "requests")
    ]
    in_flight: Annotated[Count, doc("Our other requests sent before it that had not ended.", "requests")]
    served_by: Annotated[str | UnsetType, doc("Its engine, of several; empty where not known.")] = UNSET

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> float | None:
            """Return the part of that name."""


def slowest(
    requests: RequestLog, parts: Parts, beside: Mapping[str, Floats | Missing], start_ns: int, by: Texts | None = None
) -> list[SlowRequest]:
    """Return the five requests with the longest TTFT, the longest first; fewer where fewer have one.

    `beside` are the engine's requests at each submission, and tokens by their reuse; `by` are engines.
    """
    timed = np.flatnonzero(np.isfinite(parts.ttft_s))
    order = timed[np.argsort(-parts.ttft_s[timed], kind="stable")][:MOST]
    return [_request(requests, parts, row, beside, start_ns, by) for row in order.tolist()]


def _request(
    requests: RequestLog,
    parts: Parts,
    row: int,
    beside: Mapping[str, Floats | Missing],
    start_ns: int,
    by: Texts | None,
) -> SlowRequest:
    at_ns = requests.submit_ns[row]
    open_then = (requests.submit_ns >= 0) & (requests.submit_ns < at_ns)
    open_then &= (requests.end_ns < 0) | (requests.end_ns > at_ns)
    tokens = finite(input_tokens(requests)[row])
    return SlowRequest(
        request_id=requests.request_id[row],
        trace_id=requests.trace_id[row],
        workload_class=requests.workload_class[row],
        endpoint_url=requests.endpoint_url[row],
        status=requests.status[row],
        submitted_s=float(at_ns - start_ns) / 1e9,
        ttft_ms=float(stamped_ms(parts.ttft_s[row])),
        **{json_name(part): finite(1e3 * parts.seconds(part)[row]) for part in TTFT_PARTS},
        source=parts.source[row],
        error_ms=finite(1e3 * parts.error_s[row]),
        input_tokens=None if tokens is None else int(tokens),
        **{name: None if isinstance(column, Missing) else finite(column[row]) for name, column in beside.items()},
        in_flight=int(open_then.sum()),
        served_by=UNSET if by is None else by[row],
    )


class WorkUse(Struct, frozen=True, kw_only=True):
    """The work of an engine on one other request during a wait."""

    request_id: Annotated[str, doc("Its X-Request-Id.")]
    workload_class: Annotated[str, doc("Its workload class.")]
    phase: Annotated[Phase, doc("Whether its prompt was computed, or its output.")]
    tokens: Annotated[Count, doc("Uncached tokens of its prompt, or its output tokens, all of them.", "tokens")]
    used_ms: UsedMs
    used_ratio: UsedRatio


class EngineWait(Struct, frozen=True, kw_only=True):
    """The wait of a request in one engine, until its first token, by work meanwhile."""

    request_id: Annotated[str, doc("Its X-Request-Id.")]
    trace_id: Annotated[str, doc("Its W3C trace id.")]
    engine: Annotated[str, doc("The engine's process by its spans.")]
    role: Annotated[str, doc("prefill or decode of an engine that shared the request, else empty.")]
    wait_ms: Annotated[Amount, doc("Its queue and its prefill.", "ms")]
    itself_ms: Annotated[Amount, doc("Of the wait, for its prefill itself.", "ms")]
    prefill_ms: Annotated[Amount, doc("Of the wait, for prefills of other requests.", "ms")]
    decode_ms: Annotated[Amount, doc("Of the wait, for output tokens of other requests.", "ms")]
    idle_ms: Annotated[Amount, doc("Of the wait, for no request whose span came.", "ms")]
    prefills: Annotated[Count, doc("Other requests whose prompts were computed meanwhile.", "requests")]
    decodes: Annotated[Count, doc("Other requests whose output was.", "requests")]
    largest: Annotated[list[WorkUse], doc(f"The {MOST_USERS} that used most of it, the largest first.")]


class ClassUse(Struct, frozen=True, kw_only=True):
    """The work of the engines on one workload class during waits."""

    workload_class: Annotated[str, doc("The class that was computed.")]
    phase: Annotated[Phase, doc("Whether prompts were computed, or output.")]
    used_ms: UsedMs
    used_ratio: UsedRatio


class ClassWaits(Struct, frozen=True, kw_only=True):
    """The waits of one workload class in the engines, by the work meanwhile; means."""

    workload_class: Annotated[str, doc("The class that waited.")]
    requests: Annotated[Count, doc("Its requests, those of the warm-up included.", "requests")]
    wait_ms: Annotated[Amount, doc("Mean of queue and prefill.", "ms")]
    used: Annotated[list[ClassUse], doc("Other requests by class and phase, the largest first.")]


class EngineWork(Struct, frozen=True, kw_only=True):
    """The work of the engines while requests waited for them: exact by spans, for the rule that method.md states."""

    missing: fields.Missing = UNSET
    coverage: Annotated[
        Ratio | None, doc("Share of the requests in the engines whose spans came; null where not known.", NO_UNIT)
    ] = None
    cached_unknown: Annotated[
        Count, doc("Requests of which no source says what was cached: their whole prompt counts.", "requests")
    ] = 0
    waits: Annotated[list[EngineWait], doc("Those of the slowest requests, one an engine; the slowest first.")] = []
    classes: Annotated[
        list[ClassWaits], doc(f"By workload class, of the {MOST_CLASSES} with most requests; empty where there is one.")
    ] = []


def work_while_waiting(
    requests: RequestLog,
    joined: Joined | None,
    spans: EngineSpans,
    slow: Sequence[SlowRequest],
    server_over_client: float | None,
) -> EngineWork:
    """Return the engines' work of a run: of all its `requests`, and the waits of slow ones."""
    if joined is None:
        return EngineWork(missing="a watch keeps no stamps of engines")
    return engine_work(requests, stays_of(requests, joined, spans), slow, server_over_client)


def engine_work(
    requests: RequestLog, stays: Stays | Missing, slow: Sequence[SlowRequest], server_over_client: float | None
) -> EngineWork:
    """Return the engines' work while requests waited, or the reason why it is unknown.

    `server_over_client` is the number of requests that the engines ended over that of ours.
    """
    if isinstance(stays, Missing):
        return EngineWork(missing=stays.reason)
    covered = stays.covered / max(1.0, server_over_client or 1.0)
    if covered < LEAST_COVERAGE:
        return EngineWork(
            missing=f"the engines ended {server_over_client:.2f} times as many requests as this run: "
            "what they computed for others is not known",
            coverage=covered,
        )
    stretches = stretches_of(stays)
    if isinstance(stretches, Missing):
        return EngineWork(missing=stretches.reason, coverage=covered)
    rows = {trace: row for row, trace in enumerate(requests.trace_id.tolist())}
    places = (np.flatnonzero(stays.row == rows[each.trace_id]).tolist() for each in slow)
    return EngineWork(
        coverage=covered,
        cached_unknown=stays.uncounted,
        waits=[_engine_wait(requests, stays, stretches[stays.engine[at]], at) for both in places for at in both],
        classes=_class_waits(stays, stretches.values(), requests.workload_class),
    )


def _engine_wait(requests: RequestLog, stays: Stays, engine: EngineStretches, at: int) -> EngineWait:
    used_ms = 1e3 * np.array(used_while_waiting(stays, engine, at))
    itself_ms, wait_ms = float(used_ms[0, at]), float(stays.first_ns[at] - stays.queued_ns[at]) / 1e6
    used_ms[:, at] = 0.0
    prefill_ms, decode_ms = used_ms.sum(axis=1).tolist()
    prefills, decodes = (used_ms > 0).sum(axis=1).tolist()
    order = np.argsort(-used_ms, axis=None, kind="stable")[:MOST_USERS]
    largest = [(int(place) // len(stays), int(place) % len(stays)) for place in order if used_ms.flat[place] > 0]
    return EngineWait(
        request_id=requests.request_id[stays.row[at]],
        trace_id=requests.trace_id[stays.row[at]],
        engine=stays.engine[at],
        role=stays.role[at],
        wait_ms=wait_ms,
        itself_ms=itself_ms,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        idle_ms=max(0.0, wait_ms - itself_ms - prefill_ms - decode_ms),
        prefills=prefills,
        decodes=decodes,
        largest=[
            WorkUse(
                request_id=requests.request_id[row := stays.row[stay]],
                workload_class=requests.workload_class[row],
                phase=PHASES[phase],
                tokens=int(stays.tokens[stay] if phase == 0 else max(0, requests.output_tokens[row])),
                used_ms=float(used_ms[phase, stay]),
                used_ratio=min(1.0, float(used_ms[phase, stay]) / wait_ms),
            )
            for phase, stay in largest
        ],
    )


def _class_waits(stays: Stays, stretches: Iterable[EngineStretches], classes: Texts) -> list[ClassWaits]:
    of_stays = classes[stays.row]
    several = Counter(of_stays.tolist())
    if len(several) < 2:
        return []
    names = [name for name, _ in several.most_common(MOST_CLASSES)]
    groups = np.full(len(stays), len(names))
    for at, name in enumerate(names):
        groups[of_stays == name] = at
    used_s = used_by_groups(stays, stretches, groups, len(names) + 1)[:, : len(names)]
    waits_s = (stays.first_ns - stays.queued_ns) / 1e9
    return [_class_wait(name, names, used_s[of_stays == name], waits_s[of_stays == name]) for name in names]


def _class_wait(name: str, names: Sequence[str], used_s: Floats, waits_s: Floats) -> ClassWaits:
    whole_s = float(waits_s.sum())
    used = [
        ClassUse(
            workload_class=other,
            phase=PHASES[phase],
            used_ms=1e3 * spent_s / len(waits_s),
            used_ratio=min(1.0, spent_s / whole_s) if whole_s else 0.0,
        )
        for other, of_class in zip(names, used_s.sum(axis=0).tolist(), strict=True)
        for phase, spent_s in enumerate(of_class)
        if spent_s > 0
    ]
    return ClassWaits(
        workload_class=name,
        requests=len(waits_s),
        wait_ms=1e3 * whole_s / len(waits_s),
        used=sorted(used, key=lambda each: -each.used_ms),
    )
