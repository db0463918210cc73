"""How the report begins: which run, of what, where, when, under which load, and what became of its requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sidelight.correlator.live.reasons import NO_CLIENT
from sidelight.correlator.parts import ENGINE_PARTS
from sidelight.exporter.document import Heading, Line, Prose
from sidelight.exporter.summary.result import MeasuredWindow, Summary, Workload
from sidelight.exporter.summary.watched import WatchedTraffic
from sidelight.loadgen.driver import is_closed_loop
from sidelight.loadgen.plan.leaving import leaving_of
from sidelight.loadgen.plan.rates import pace_of
from sidelight.loadgen.requests.rates import HeldBack
from sidelight.loadgen.requests.summary import RequestCounts
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.fields import UNSET
from sidelight.rundir.printable.numbers import count_of, duration, ms, spoken
from sidelight.rundir.printable.text import first_of


def heading(summary: Summary) -> Heading:
    """Return the first lines."""
    if summary.watch:
        return _watched(summary, summary.watch)
    config, engine = summary.config, summary.server.engine
    target = config.get("model") or "server metrics only"
    where = first_of(urls_of(config) or config.get("metrics") or ())
    server = f", {engine.name} {engine.version or ''}".rstrip() if engine else ""
    sent, duration_s = summary.client.requests.sent, summary.window.duration_s
    when = f"{summary.window.start[:10]} {summary.window.start[11:19]} UTC"
    when += f", {duration_s:,.1f} s" if duration_s else ""
    lines = (
        f"{target} at {where}{server}",
        f"{when}: {_load(config, summary.workload)}" if sent else when if duration_s else "",
        _counts(summary.client.requests) if sent else "",
        held_sentence(summary.client.held_back) if summary.client.held_back else "",
    )
    status = summary.status, "met" if summary.status == "complete" else "alarm"
    return _title(summary, "run", status), *(Prose(line) for line in lines if line)


def _title(summary: Summary, kind: str, status: tuple[str, str]) -> Line:
    return Line(((f"sidelight {summary.tool.version}", "strong"), (f"  {kind} {summary.run_id}  ", ""), status))


def held_sentence(held: HeldBack) -> str:
    """Return a sentence on the requests held back by the cap on requests in flight. It states the effect on the
    schedule.
    """
    cap = f"The cap of {count_of(held.cap, 'request')} in flight"
    if not held.requests and not held.not_sent:
        return f"{cap} held nothing back: the schedule was kept."
    waits = held.held_ms
    times = f" (median {ms(waits.p50)} ms, longest {ms(waits.max)} ms)" if held.requests else ""
    never = f"; {held.not_sent:,} more were still held at the end and not sent" if held.not_sent else ""
    return (
        f"{cap} held back {count_of(held.requests, 'request')}{times}{never}. So this was not an open loop, "
        "and TTFT, counted from the submission, leaves that wait out."
    )


def _counts(requests: RequestCounts) -> str:
    """Return the number of requests by outcome; outcomes with zero requests are left out, except ok."""
    if not requests.sent:
        return "no requests"
    if requests.ok == requests.sent:
        return f"{count_of(requests.sent, 'request')}, {'all ' if requests.sent > 1 else ''}ok"
    kinds = {
        "ok": "ok",
        "failed": "failed",
        "refused": "refused",
        "left": "left",
        "cancelled": "cancelled",
        "in_flight": "never ended",
    }
    counts = {label: getattr(requests, name) or 0 for name, label in kinds.items()}
    shown = (f"{count:,} {label}" for label, count in counts.items() if count or label == "ok")
    return f"{count_of(requests.sent, 'request')}: {', '.join(shown)}"


def _watched(summary: Summary, watch: WatchedTraffic) -> Heading:
    """Return the time of a watch that the numbers cover, and its number of requests."""
    config, window, engine = summary.config, summary.window, summary.server.engine
    pages = dict.fromkeys([*(config.get("metrics") or ()), *(page.url for page in summary.server.endpoints)])
    where = first_of(list(pages)) or "no page, by spans alone"
    server = f", {engine.name} {engine.version or ''}".rstrip() if engine else ""
    covered = f"{window.start[:10]} {window.start[11:19]} to {_until(window)} UTC, {duration(window.duration_s)}"
    if watch.shortened:
        covered += (
            f"; watched since {watch.begun[:10]} {watch.begun[11:19]}, but older logs were deleted "
            f"(--keep {config.get('keep')}, --keep-bytes {config.get('keep_bytes')}) or left out"
        )
    is_seen = summary.client.requests.sent > 0
    counts = f"{_counts(summary.client.requests)}, by their outermost spans" if is_seen else "no client's spans"
    if unseen := watch.missing.get(NO_CLIENT):
        stated = by_engines(watch.engine_only_ms)
        counts += f"; {count_of(unseen, 'engine request')} without a client's span{f' ({stated})' if stated else ''}"
    shards = f", {'shards' if watch.shards else 'shard'} {config['shard']}" if config.get("shard") else ""
    lines = [f"traffic at {where}{server}{shards}", covered, counts]
    if watch.shortened and (since := watch.since_start):
        lines.append(
            f"since the start: {count_of(since.by_trace, 'request')} broken down by spans, "
            f"{since.estimated:,} by estimates, {since.without_breakdown:,} not; {count_of(since.spans, 'span')}; "
            f"{count_of(since.receiver_restarts, 'receiver restart')}"
        )
    lines += _headroom(watch)
    # Whether it goes on or was killed cannot be seen in its logs.
    status = ("not ended", "warning") if summary.status == "crashed" else (summary.status, "met")
    return _title(summary, "watch", status), *map(Prose, lines)


def _headroom(watch: WatchedTraffic) -> Iterator[str]:
    """Yield the last headroom that was said, and the least."""
    if watch.headroom:
        least = min(watch.headroom, key=lambda each: math.inf if each.estimate is UNSET else each.estimate)
        for each in dict.fromkeys((watch.headroom[-1], least)):
            yield f"{iso_ms(each.at_ns)[:16].replace('T', ' ')} UTC: {each.text}"


def by_engines(means_ms: Mapping[str, float]) -> str:
    """Return the means that engines' spans state of requests without a client's span; "" for none."""
    stated = [f"{part.label} {spoken(means_ms[part.name])}" for part in ENGINE_PARTS if part.name in means_ms]
    return f"by the engine, on average: {', '.join(stated)}" if stated else ""


def _until(window: MeasuredWindow) -> str:
    return window.end[11:19] if window.end[:10] == window.start[:10] else f"{window.end[:10]} {window.end[11:19]}"


def _load(config: Mapping[str, Any], workload: Workload) -> str:
    limits = [count_of(config["requests"], "request")] if config["requests"] else []
    limits += [f"{config['duration']:g} s"] if config["duration"] else []
    warm_up = workload.warmup_requests
    parts = (
        _loop(config),
        f"for {' or '.join(limits)}" if limits else "",
        f"after a warm-up of {count_of(warm_up, 'request')}" if warm_up else "no warm-up",
        _leaving(config),
        f"workload {workload.name}",
        f"seed {workload.seed}",
    )
    return ", ".join(part for part in parts if part)


def _leaving(config: Mapping[str, Any]) -> str:
    """Return the share of the clients that leave, and when; "" for none."""
    leaving = leaving_of(config.get("leave"), 0)
    if leaving is None:
        return ""
    return f"{100 * leaving.ratio:g} % of the clients leave after {leaving.after_ns / 1e9:g} s"


def _loop(config: Mapping[str, Any]) -> str:
    cap = config["concurrency"]
    if is_closed_loop(concurrency=cap, rate=config["rate"], trace=config.get("trace")):
        return f"{count_of(cap, 'request')} in flight"
    limit = f", at most {cap} in flight" if cap else ""
    if config.get("trace"):
        return f"arrivals of {config['trace']}{limit}"
    if not config["rate"]:
        return f"arrivals of {config.get('replay_requests')}"
    pace = pace_of(config["rate"])
    to_per_s = pace.to_per_s or config.get("ramp_to")  # an option of earlier versions
    to = f" to {to_per_s:g}" if to_per_s else ""
    unit = "request/s" if pace.per_s == 1 and not to else "requests/s"
    return f"{pace.per_s or 0:g}{to} {unit} ({config['arrival']}){limit}"


def urls_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URLs of a recorded configuration: a run has several, a scrape one or none."""
    urls = config.get("url") or ()
    return (urls,) if isinstance(urls, str) else tuple(urls)
