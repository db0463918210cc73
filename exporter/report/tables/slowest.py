"""The slowest requests one by one, with ids, and the engine's work meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from sidelight.correlator.load.reuse import REUSED, reused_label
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import BLANK, Block, Line, Prose, Table, numbers, table, words
from sidelight.exporter.summary.breakdown import Breakdown, json_name, short_label_of
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.slowest import ClassWaits, EngineWait, Phase, SlowRequest
from sidelight.rundir.printable.numbers import cell, count_of, percent, spoken

# What ran beside a request as it was sent, by the engine's count or else ours, and how long its prompt was.
BY_ENGINE = (("requests_waiting", "waiting"), ("requests_running", "running"))
BY_CLIENT = (("in_flight", "in flight"),)
PROMPT = (("input_tokens", "input"),)
REUSE = ("served_by", "cached_tokens", *REUSED)
LEAST_SHARE = 0.05  # of a wait: less is not worth a word
WORK = (("itself", "itself"), ("prefill", "others' prompts"), ("decode", "others' output"), ("idle", "nothing"))


def slowest_section(requests: Sequence[SlowRequest], breakdown: Breakdown) -> Iterator[Block]:
    """Yield a row for each request, then its ids; what is known of no request has no column."""
    if not requests:
        return

    def known(name: str) -> bool:
        return any(getattr(request, name) is not None for request in requests)

    parts = [part for part in TTFT_PARTS if known(json_name(part))]
    by_engine = [(name, label) for name, label in BY_ENGINE if known(name)]
    beside = (*(by_engine or BY_CLIENT), *(PROMPT if known("input_tokens") else ()))
    classes = len({request.workload_class for request in requests}) > 1
    columns = [*numbers("TTFT", *(short_label_of(part, breakdown) for part in parts))]
    columns += numbers(*(label for _, label in beside), show=cell)
    names = ("ttft_ms", *map(json_name, parts), *(name for name, _ in beside))
    if classes:
        columns.append(words("class"))
        names = (*names, "workload_class")
    rows = ((str(at), *(getattr(request, name) for name in names)) for at, request in enumerate(requests, start=1))
    yield table("Slowest requests, ms, and what ran beside them", columns, rows, label_width=2)
    for number, request in enumerate(requests, start=1):
        status = "" if request.status == "ok" else f" {request.status}"
        identified = f" request {request.request_id}" if request.request_id else ""
        yield Line(((f" {number} trace {request.trace_id}{identified}{status}", ""),), "note")
    yield BLANK
    reused = [name for name in REUSE if any(getattr(request, name) is not UNSET for request in requests)]
    if reused:
        served = [words("served by")] if "served_by" in reused else []
        labels = map(reused_label, reused[len(served) :])
        rows = ((str(at), *(getattr(request, name) for name in reused)) for at, request in enumerate(requests, start=1))
        yield table("Their prompts' tokens in caches", [*served, *numbers(*labels, show=cell)], rows, label_width=2)


def work_section(summary: Summary) -> Iterator[Block]:
    """Yield the engine's work while the slowest requests waited; why not, where spans came."""
    correlation = summary.correlation
    if (work := correlation.work).missing:
        if correlation.coverage.trace:
            yield Prose(f"What the engine did while requests waited is not known: {work.missing}.", "note")
            yield BLANK
        return
    yield work_table(correlation)
    lines = [Prose(line, "note") for line in work_lines(summary)]
    yield from (*lines, BLANK) if lines else ()


def work_table(correlation: Correlation) -> Table:
    """Return the slowest requests' waits in engines by the work meanwhile."""
    number = _numbers(correlation)
    columns = [*numbers("wait"), *numbers(*(label for _, label in WORK), show=percent)]
    rows = (
        (f"{number[wait.trace_id]} {wait.role}".strip(), wait.wait_ms, *(_share(wait, name) for name, _ in WORK))
        for wait in correlation.work.waits
    )
    return table("While these waited in the engine, ms, it computed", columns, rows, label_width=2)


def work_lines(summary: Summary) -> Iterator[str]:
    """Yield the largest work of each of these waits, and of each class's; and doubts."""
    correlation, preemptions, hits = summary.correlation, summary.server.preemptions, summary.server.prefix_cache_hits
    number = _numbers(correlation)
    explained = (each for each in correlation.work.waits if max(each.prefill_ms, each.decode_ms) > each.wait_ms / 4)
    yield from (f"{number[wait.trace_id]}: {_sentence(wait)}" for wait in explained)
    yield from map(_of_class, filter(_has_share, correlation.work.classes))
    if preemptions and preemptions.stats.total:
        times = count_of(round(preemptions.stats.total), "preemption")
        yield f"No span tells of the {times} in the engine: these shares may be off."
    if correlation.work.cached_unknown and not (hits and hits.stats.total == 0):
        asked = count_of(correlation.work.cached_unknown, "request")
        yield f"Of {asked} no source says what was cached: their whole prompts count as computed."
    if correlation.server_over_client is None:
        yield "No page of the engine says whether others used it too."


def _numbers(correlation: Correlation) -> dict[str, int]:
    return {request.trace_id: at for at, request in enumerate(correlation.slowest, start=1)}


def _share(wait: EngineWait, name: str) -> float | None:
    return getattr(wait, f"{name}_ms") / wait.wait_ms if wait.wait_ms else None


def _sentence(wait: EngineWait) -> str:
    """Return the largest work of a wait: prompts or output of others, and the largest of them."""
    where = f" in the {wait.role} engine" if wait.role else ""
    phase: Phase = "prefill" if wait.prefill_ms >= wait.decode_ms else "decode"
    count, what = (wait.prefills, "prompt") if phase == "prefill" else (wait.decodes, "output")
    several = "prompts" if phase == "prefill" else what
    largest = next((use for use in wait.largest if use.phase == phase), None)
    whole = f"{percent(_share(wait, phase))} of this wait{where} went into "
    if largest is None:
        return f"{whole}the {several} of {count_of(count, 'request')}."
    tokens = count_of(largest.tokens, "token")
    request = f"request {largest.request_id} ({tokens}, class {largest.workload_class})"
    if count == 1:
        return f"{whole}the {what} of {request}."
    share = percent(largest.used_ratio)
    return f"{whole}the {several} of {count_of(count, 'request')}: {share} into that of {request}."


def _has_share(waits: ClassWaits) -> bool:
    return bool(waits.used) and waits.used[0].used_ratio >= LEAST_SHARE


def _of_class(waits: ClassWaits) -> str:
    kinds = {"prefill": "prompts", "decode": "output"}
    shares = (
        f"{percent(use.used_ratio)} into {kinds[use.phase]} of class {use.workload_class}"
        for use in waits.used
        if use.used_ratio >= LEAST_SHARE
    )
    return f"Of the waits of class {waits.workload_class} (mean {spoken(waits.wait_ms)}): {', '.join(shares)}."
