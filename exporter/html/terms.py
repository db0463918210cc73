"""Terms and their meanings: tooltips of the pages and, by `make docs`, the glossary of the documentation.

Labels of one meaning are separated by commas; the first stands in the glossary. A label of a page may go on behind a
term, as in "KV cache usage".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PARTS = {
    "outside the engine, network, outside, rest outside":
        "network there and back, and whatever sends no spans; with a gateway's spans, what is in neither",
    "gateway": "time in a gateway, by its own spans",
    "queue": "from the engine's arrival to its scheduling",
    "prefill": "from scheduling to the first token",
    "between engines": "from the end of the prefill engine's work to the arrival at the decode engine",
    "KV transfer": "from the prefill engine's cache to the decode engine's, where an engine states it",
    "decode queue": "wait at the decode engine; of vLLM an asynchronous load of the KV cache in it",
    "first decode step": "from the first scheduling at the decode engine to its first token",
    "other": "the engine outside queue and prefill, and what no source tells apart",
}  # fmt: skip
WORDS = {
    "API server": "of `other`: tokenising, waiting for the running step, output",
    "arrival": "moment at which a request is due by the schedule",
    "before its call": "of `gateway`: authentication and routing, until it called the next server",
    "blank output": "of `other`: tokens without visible text, before the first that shows",
    "breakdown": "the parts of a request's TTFT; they sum to it",
    "known from, breakdown from":
        "where times are from: spans and replies are exact, an estimate is from scrapes, `none` has a reason",
    "closed loop": "a fixed number of requests in flight",
    "connect and send, send": "before the TTFT begins: from the dispatch to the submit",
    "decode": "from the first token to the last",
    "decode to first token":
        "of two engines that state no parts, as workers of Dynamo: from the prefill's end to the router's first output",
    "drain": "wait for the replies in flight after the last submission",
    "E2E, end-to-end time": "from submission to the end of the reply",
    "estimate": "time of a request computed from scrapes alone, with a standard error",
    "elsewhere": "of a prompt's tokens those that were not cached, and computed before by other engines alone",
    "evicted": "of a prompt's tokens those that were not cached any more, and computed before by the same engine",
    "exact": "time of a request that the engine stated, in a span or its reply",
    "expected cached": "of a prompt's tokens those that the router expected in a cache",
    "failed": "requests that failed or were refused, of those that were sent",
    "from the engine": "of the network: from the engine's first token to the client's first output",
    "goodput": "requests per second that meet every objective",
    "in flight": "sent, and not yet answered in full",
    "ITL, gaps between chunks": "gap between two chunks of a reply",
    "KV cache": "the engine's memory of running requests; full, it queues or preempts",
    "loop delay, timers fired late": "how much later than due a timer of a load worker came",
    "new": "of a prompt's tokens those that were not cached, and in no prompt answered before",
    "objective": "a limit of `--slo`; a failed request misses it",
    "offered load": "requests per second that the schedule asks for; served is what was answered",
    "open loop": "requests are sent when they are due, whatever the server does",
    "p50, p90, p95, p99, p99.9": "so many of 100 values are at or below it; p50 is the median",
    "phase": "measure: the load that counts; what came before it warmed the engine up",
    "preemption, preemptions": "a running request is sent back to the queue, for want of KV cache",
    "prefill with its queue": "of two engines that state no parts: all the time at the prefill engine",
    "prefix cache": "prompts that begin alike share their prefill; hits make it shorter",
    "proxies and HTTP": "of the network: what the TCP round trip does not explain",
    "running, requests running": "requests that the engine works on at once",
    "saturated": "more load brings no more throughput",
    "scheduler intake": "of `other`: until the scheduler, between two of its steps, takes a request in",
    "scrape interval": "time between two readings of a metrics page; estimates are as fine as it",
    "seats": "requests that the engine runs at once, at most",
    "self-check": "the load generator's own error",
    "served": "requests that ended ok a second, of those that the schedule offered",
    "share": "part of the mean TTFT; none where its error exceeds it",
    "slice": "2 s of the run by default, with its own rates and percentiles",
    "span": "record of one operation, sent by an engine, gateway or client over OTLP; a *trace* is a request's spans",
    "standard error": "by how much two of three estimates are off at most",
    "steady part": "stretch of a run without its ramp and drain",
    "step": "one run of a study; *void*: it does not count, and the report says why",
    "stolen": "processor time that the host gave to other virtual machines",
    "submit": "just before a request's last byte is handed to the kernel (over TLS, WebSocket and gRPC: just after)",
    "sustained": "requests did not pile up; else latencies depend on the run's length",
    "TCP round trip": "of the network: one round trip to the server that was asked",
    "to the engine": "of the network: from the submission to the arrival at the engine",
    "TPOT, time per output token": "time per output token after the first",
    "TTFT": "from submission to the first token with content",
    "TTFT p50": "TTFT of the median request",
    "TTFT p99": "TTFT that 99 of 100 requests kept",
    "waiting, requests waiting": "requests in the engine's queue, not running yet",
    "warm-up": "requests before the measurement, which do not count",
    "window": "the measured stretch: from the start of the load to the end of the last whole reply",
}  # fmt: skip


def _titles(terms: Mapping[str, str]) -> dict[str, str]:
    """Return the meaning of each label, in lower case; without marks of Markdown."""
    plain = {label: re.sub(r"[`*]", "", meaning) for label, meaning in terms.items()}
    return {each.lower(): meaning for labels, meaning in plain.items() for each in labels.split(", ")}


TITLES = _titles(PARTS | WORDS)
MOST_WORDS = max(len(label.split()) for label in TITLES)
_LEAD = re.compile(r"^(?:·+ )?(?:or: )?")


def title_of(label: str) -> str:
    """Return the meaning of the longest term that a label begins with; "" without one."""
    words = [word.rstrip(",:;") for word in _LEAD.sub("", label).lower().split(None, MOST_WORDS)[:MOST_WORDS]]
    leads = (" ".join(words[:end]) for end in range(len(words), 0, -1))
    return next((TITLES[lead] for lead in leads if lead in TITLES), "")
