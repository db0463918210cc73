"""Which spans of one trace are of one request of a model: its client's, its gateway's, its engines'.

What a single span says is left to `client_spans` and `scraper.spans`; when all are there, to `window`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from correlator.live.client_spans import ClientSpan
from scraper.spans.received import OTHER, ReceivedSpan

_CLOCKS_NS = 50_000_000  # by which a client's and an engine's clock may differ, and one span still enclose the other
_DEPTH = 32
_NO_RESOURCE = Resource()
_LONGEST_TEXT = 256  # an id is shorter; a prompt is longer, and no business of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a model. Without `client`, only an engine told of it; without `engine`, only a client.

    `client` is the outermost span that is of this request alone, `gateway` that of a known gateway below it. `engine`
    are the spans of engines, several for several choices, with those of their stages. `evicted`: it was not waited for.
    """

    client: ClientSpan | None
    gateway: ClientSpan | None
    engine: tuple[ReceivedSpan, ...]
    evicted: bool = False


@dataclass(slots=True)
class Trace:
    """What is known of one trace, its spans by their ids. `done` are those of requests that were given out."""

    spans: dict[bytes, ClientSpan] = field(default_factory=dict)
    engine: dict[bytes, ReceivedSpan] = field(default_factory=dict)
    stages: dict[bytes, ReceivedSpan] = field(default_factory=dict)
    done: set[bytes] = field(default_factory=set)
    oldest_ns: int = 0
    newest_ns: int = 0
    look_ns: int = 0  # nothing of it can be finished before

    def chain(self, span: ClientSpan) -> tuple[list[ClientSpan], bool]:
        """Return the spans above one, nearest first, and whether they go up to one without a parent."""
        above: list[ClientSpan] = []
        parent = span.parent_id
        while parent and len(above) < _DEPTH:
            found = self.spans.get(parent)
            if found is None or found in above:
                return above, False
            above.append(found)
            parent = found.parent_id
        return above, not parent


@dataclass(slots=True)
class _Group:
    """The spans of engines below one span: one request, given several times for its choices."""

    engine: list[ClientSpan]
    above: list[ClientSpan]
    rooted: bool


def requests_of(trace: Trace) -> Iterator[tuple[TracedRequest, int, bool]]:
    """Give the requests of a trace that were not given out yet: when the first span of each came, and if all came."""
    groups = _groups(trace)
    passed = Counter(one.span_id for group in groups for one in group.above)
    below = {one.span_id for group in groups for one in (*group.above, *group.engine)}
    for group in groups:
        client = _client(group.above, passed)
        if group.engine[0].span_id in trace.done:
            continue
        gateway = next((one for one in reversed(group.above) if one.is_gateway and one is not client), None)
        if client is not None and client.span_id in trace.done:
            client = None  # it was given out before its engine told of it
        parts = [*group.engine, *([client] if client else [])]
        engine = tuple(trace.engine[one.span_id] for one in group.engine)
        is_whole = client is not None and group.rooted and all(one.kind.tells_all for one in engine)
        request = TracedRequest(client=client, gateway=gateway, engine=engine + _stages(trace, engine))
        yield request, min(one.received_ns for one in parts), is_whole
    for span in trace.spans.values():
        if span.is_call and span.span_id not in below and span.span_id not in trace.done:
            above, _ = trace.chain(span)
            if not any(one.is_call for one in above):
                yield TracedRequest(client=span, gateway=None, engine=()), span.received_ns, False


def _groups(trace: Trace) -> list[_Group]:
    """Put the engines' spans that one span called together."""
    groups: dict[bytes, _Group] = {}
    for key in trace.engine:
        span = trace.spans[key]
        chain, rooted = trace.chain(span)
        above = [one for one in chain if one.encloses and one.span_id not in trace.engine]
        if not above:
            above, rooted = _enclosing(trace, span), False
        nearest = above[0].span_id if above else span.parent_id or key
        group = groups.setdefault(nearest, _Group(engine=[], above=above, rooted=rooted))
        group.engine.append(span)
        group.rooted = group.rooted and rooted
    return list(groups.values())


def _enclosing(trace: Trace, span: ClientSpan) -> list[ClientSpan]:
    """Return the spans that enclose one in time, the shortest first: all there is where parents do not tell."""
    found = [
        one
        for key, one in trace.spans.items()
        if one.encloses
        and key not in trace.engine
        and one.start_ns - _CLOCKS_NS <= span.start_ns
        and span.end_ns <= one.end_ns + _CLOCKS_NS
    ]
    return sorted(found, key=lambda one: one.end_ns - one.start_ns)


def _client(above: Sequence[ClientSpan], passed: Mapping[bytes, int]) -> ClientSpan | None:
    """Choose the client's span: the outermost call of a model that holds this request alone, else the nearest span."""
    alone = [one for one in above if passed[one.span_id] == 1]
    calls = [one for one in alone if one.is_call]
    return calls[-1] if calls else alone[0] if alone else None


def _stages(trace: Trace, engine: Sequence[ReceivedSpan]) -> tuple[ReceivedSpan, ...]:
    """Return the stages of an engine's request, with what leads from them up to it; the latter without its content."""
    if not trace.stages:
        return ()
    wanted = {one.span.span_id for one in engine}
    found: dict[bytes, ReceivedSpan] = {}
    for key, stage in trace.stages.items():
        chain, _ = trace.chain(trace.spans[key])
        ids = [one.span_id for one in chain]
        if wanted.isdisjoint(ids) and len(trace.engine) > 1:
            continue
        found[key] = stage
        for one in chain:
            if one.span_id in wanted:
                break
            if one.span_id not in trace.stages:
                own = _bare(stage.span.trace_id, one.span_id, one.parent_id, one.start_ns, one.end_ns)
                found[one.span_id] = replace(stage, received_ns=one.received_ns, span=own, kind=OTHER)
    return tuple(found.values())


def own_copy(received: ReceivedSpan) -> ReceivedSpan:
    """Copy a span without its long texts, events and links: one of an export keeps all of the export in memory."""
    span = received.span
    own = _bare(span.trace_id, span.span_id, span.parent_span_id, span.start_time_unix_nano, span.end_time_unix_nano)
    own.name = span.name[:_LONGEST_TEXT]
    own.attributes.extend(
        one for one in span.attributes if one.value.ByteSize() <= _LONGEST_TEXT and len(one.key) <= _LONGEST_TEXT
    )
    return replace(received, span=own, resource=_NO_RESOURCE)


def _bare(trace_id: bytes, span_id: bytes, parent_id: bytes, start_ns: int, end_ns: int) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=end_ns,
    )
