"""Reasons for missing TTFT breakdowns of production requests, and places of broken traces.

Both are given as labels of metrics, and in words.
"""

from collections.abc import Mapping

from sidelight.rundir.printable.numbers import count_of

NO_ENGINE = "no_engine_span"
NO_CLIENT = "no_client_span"
NO_FIRST = "no_first_token"
NO_TIMES = "no_engine_times"
CONTRADICTION = "contradiction"
FAILED = "failed"
EVICTED = "window_full"
NOT_ESTIMATED = "not_estimated"
DEFECT = "defect"
EXPLANATIONS = {
    NO_ENGINE: "no engine's span came for it, and there was no page to estimate from",
    NO_CLIENT: "no client's span came for it in time",
    NO_FIRST: "the client's span does not say when the first output arrived",
    NO_TIMES: "the engine's span states neither queue nor prefill time, or several could be the request's",
    CONTRADICTION: "the client waited less than the times that the engine states",
    FAILED: "the client's span ended in an error, and no engine's span came for it",
    EVICTED: "more spans arrived than are kept, and it was not waited for",
    NOT_ESTIMATED: "too few scrapes or requests in the minute around it to estimate from",
    DEFECT: "it was lost to a defect of Sidelight's",
}
REASONS = tuple(EXPLANATIONS)
# How the trace of a request breaks: a service begins another; or one that is in it, or none, is the last before that.
NEW_TRACE, NOT_PASSED_ON = "new_trace", "not_passed_on"
Break = tuple[str, str]  # the service, "" for none, and how
BREAKING_RATIO = 0.95
ELSEWHERE: Break = ("", "another_shard")  # where spans of one trace reach several shards
MISROUTED_RATIO = 0.05
LEAST_HALVES = 10  # in a minute
_ROUTE = "route by trace id (Collector's exporter load_balancing, routing_key: traceID)"
NOT_COMPARED = "a watch compares no clocks"


def explain_breaks(broken: Mapping[Break, int], whole: int) -> dict[Break, str]:
    """Say where the traces of nearly all requests break, and why, the most frequent first; nothing where they do not.

    `broken` counts requests by where their trace breaks, `whole` are those with one trace.
    """
    count = sum(broken.values())
    if count <= BREAKING_RATIO * (count + whole):
        return {}
    usual = [where for where, here in broken.items() if here > (1 - BREAKING_RATIO) * count]
    return {
        where: f"{broken[where]:,} of {count_of(count + whole, 'request')} with the client's spans in one trace and "
        f"the engine's in another, so that the two are not joined by trace: {_why(*where)}"
        for where in sorted(usual, key=lambda where: -broken[where])
    }


def explain_routing(halves: Mapping[str, int]) -> str:
    """Return the warning of a wrong route, by the requests of one shard; "" for none.

    `halves` counts requests by what they lack, NO_ENGINE or NO_CLIENT, "" for nothing.
    """
    no_engine, no_client = halves.get(NO_ENGINE, 0), halves.get(NO_CLIENT, 0)
    requests = no_engine + halves.get("", 0)
    if not no_client or no_engine < LEAST_HALVES or no_engine <= MISROUTED_RATIO * requests:
        return ""
    return (
        f"{no_engine:,} of {count_of(requests, 'request')} came without an engine's span, and "
        f"{count_of(no_client, 'engine request')} without the span of the caller: the spans of a trace reach several "
        f"shards; {_ROUTE}, unless shards were just added or removed"
    )


def explain_split(traces: int, split: int) -> str:
    """Return the warning of a wrong route, by the traces of all shards; "" for none.

    Few traces are split where the number of shards changes: those in flight.
    """
    if split <= MISROUTED_RATIO * traces:
        return ""
    return (
        f"the spans of {split:,} of {count_of(traces, 'trace')} came to several shards: they are joined here, but not "
        f"on the shards' own pages and reports; {_ROUTE}"
    )


def _why(service: str, how: str) -> str:
    if how == NEW_TRACE:
        return f"{service} begins a new trace instead of going on with that of the header traceparent"
    what = f"{service}, or what is behind it," if service else "something between client and engine"
    return f"{what} does not pass the header traceparent on"
