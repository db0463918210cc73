"""Which spans of one trace are of one request of a model: its client's, its gateway's, its engines'.

What a single span says is left to `client_spans` and `scraper.spans`; when all are there, to `window`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.recorded.client_spans import ClientSpan, chain, encloses
from sidelight.recorded.gateway_spans import GatewaySpan
from sidelight.scraper.spans.received import OTHER, ReceivedSpan, attributes_of, bare_resource

_LONGEST_TEXT = 256  # an id is shorter; a prompt is longer, and is not ours to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a model. Without `client`, only spans of engines came; without `engine`, only the client's.

    `client` is the outermost span that is of this request alone, `gateways` are those below it, outermost first, and
    it itself where it is a gateway's. `engine` are the spans of engines, several for several choices, with those of
    their stages. `evicted`: it was not waited for. `is_late`: a half of it was given out before, by itself; `given` is
    its client's span there, b"" where that was only the engine's.
    `joined`: how the client's and the engine's spans were found to be of one request.

    Of a request that is not whole, or begins at a gateway, `begins_at` is the service of the outermost span above the
    engine, and `is_root` says that no span is above that one; without an engine, `ends_at` is that of the innermost
    server. Both are "" for none.
    """

    client: ClientSpan | None
    engine: tuple[ReceivedSpan, ...]
    gateways: tuple[GatewaySpan, ...] = ()
    evicted: bool = False
    is_late: bool = False
    given: bytes = b""
    begins_at: str = ""
    ends_at: str = ""
    is_root: bool = False
    trace_id: bytes = b""
    joined: Literal["trace", "id", "time"] = "trace"

    @property
    def processes(self) -> set[str]:
        """Return the processes of the engines by their spans."""
        return {received.process for received in self.engine if received.kind.role == "request"}

    @property
    def awaits_decode(self) -> bool:
        """Return whether a decode engine may go on with it.

        The only engine that is known was asked for one token, and not by the client as far as that says.
        """
        requests = [received for received in self.engine if received.kind.role == "request"]
        asked_for_one = self.client is not None and self.client.output_tokens == 1
        return len(requests) == 1 and not asked_for_one and _is_of_prefill(requests[0], self.engine)


@dataclass(slots=True)
class SpanTrace:
    """Spans of one trace by their ids.

    `done` are those of requests that were given out, `bodies` is when the first part of a reply was sent by a span.
    """

    trace_id: bytes = b""
    spans: dict[bytes, ClientSpan] = field(default_factory=dict)
    bodies: dict[bytes, int] = field(default_factory=dict)
    engine: dict[bytes, ReceivedSpan] = field(default_factory=dict)
    stages: dict[bytes, ReceivedSpan] = field(default_factory=dict)
    done: set[bytes] = field(default_factory=set)
    oldest_ns: int = 0
    newest_ns: int = 0
    look_ns: int = 0  # nothing of it can be finished before
    shard: int = 0  # which its first span came to
    is_split: bool = False  # others came to another one


@dataclass(slots=True)
class _Group:
    """The spans of engines below one span: those of one request, several for several choices."""

    engine: list[ClientSpan]
    above: list[ClientSpan]
    rooted: bool


def requests_of(trace: SpanTrace) -> Iterator[tuple[TracedRequest, int, bool]]:
    """Give the requests of a trace that were not given out yet: when the first span of each came, and if all came.

    No span says how many steps a search has: of one it is when its last span came, behind which others may come.
    """
    groups = _groups(trace)
    passed = Counter(member.span_id for group in groups for member in group.above)
    taken = {member.span_id for group in groups for member in (*group.above, *group.engine)}
    for group in groups:
        client = _client(group.above, passed)
        # What is above was given out before its engine's span came: its client's, or a gateway's before that.
        given = _given(trace, group.above) if client is not None else b""
        is_late = bool(given)
        if group.engine[0].span_id in trace.done:
            # Its engine's span was given out, if without a client: that came since then.
            if client is None or given:
                continue
            is_late = True
        members = [*group.engine, *([client] if client else [])]
        parts = [member for member in members if member.span_id not in trace.done]
        engine = tuple(trace.engine[member.span_id] for member in group.engine)
        is_search = _is_step(engine[0])
        is_whole = client is not None and group.rooted and all(member.kind.tells_all for member in engine)
        engine += _stages(trace, engine)
        request = TracedRequest(client=client, engine=engine, is_late=is_late, given=given, trace_id=trace.trace_id)
        # A prefill engine's span comes long before the others of its request.
        later = [member for member in parts if not _is_of_prefill(trace.engine.get(member.span_id))]
        came_ns = [member.received_ns for member in later or parts]
        yield request, max(came_ns) if is_search else min(came_ns), is_whole and not is_search
    given_out = [trace.spans[key] for key in trace.done if key in trace.spans]
    taken |= trace.done.union(member.span_id for span in given_out for member in chain(trace.spans, span)[0])
    for span in trace.spans.values():
        if span.is_call and span.span_id not in taken:
            above, _ = chain(trace.spans, span)
            if not any(member.is_call for member in above):
                yield TracedRequest(client=span, engine=(), trace_id=trace.trace_id), span.received_ns, False


def _is_step(received: ReceivedSpan) -> bool:
    known = received.kind.spans
    return bool(known and known.step_id and known.request_of_step(received.request_id))


def _given(trace: SpanTrace, above: Sequence[ClientSpan]) -> bytes:
    """Return the nearest of some spans that was given out, b"" for none."""
    return next((span.span_id for span in above if span.span_id in trace.done), b"")


def with_gateways(request: TracedRequest, gateways: tuple[GatewaySpan, ...]) -> TracedRequest:
    """Return a request with the gateways that it passed.

    Where it begins at the outermost, its first output is that gateway's, by whichever of its spans says it.
    """
    client = request.client
    if not gateways:
        return request
    if client is not None and client.serves and math.isnan(client.first_s):
        first_s = next((gateway.first_s for gateway in gateways if gateway.service == client.service), math.nan)
        client = replace(client, first_s=first_s)
    return replace(request, client=client, gateways=gateways)


def last_servers(trace: SpanTrace) -> Mapping[bytes, str]:
    """Return the service of the innermost server below each span that has one."""
    innermost: dict[bytes, tuple[int, str]] = {}
    for span in trace.spans.values():
        for depth, step in enumerate(chain(trace.spans, span)[0] if span.serves else ()):
            if depth > innermost.get(step.span_id, (-1, ""))[0]:
                innermost[step.span_id] = depth, span.service
    return {key: service for key, (_, service) in innermost.items()}


def with_ends(trace: SpanTrace, request: TracedRequest, servers: Callable[[], Mapping[bytes, str]]) -> TracedRequest:
    """Return a request with the services at the ends of its trace; one that is whole as it is.

    `servers` gives the trace's `last_servers`, once for all of its requests, of which there may be thousands.
    """
    client = request.client
    begins_at, ends_at, is_root = "", "", False
    if client is None or client.serves:
        inner = client or trace.spans[request.engine[0].span.span_id]
        above, is_root = chain(trace.spans, inner)
        outermost = next((span for span in reversed([inner, *above]) if span.span_id not in trace.engine), None)
        begins_at = outermost.service if outermost else ""
    elif request.engine:
        return request
    if client is not None and not request.engine:
        ends_at = servers().get(client.span_id, client.service if client.serves else "")
    return replace(request, begins_at=begins_at, ends_at=ends_at, is_root=is_root)


def _groups(trace: SpanTrace) -> list[_Group]:
    """Put the engines' spans that one span called together."""
    groups: dict[bytes, _Group] = {}
    for key in trace.engine:
        span = trace.spans[key]
        higher, rooted = chain(trace.spans, span)
        above = [candidate for candidate in higher if candidate.encloses and candidate.span_id not in trace.engine]
        if not above:
            above, rooted = _enclosing(trace, span), False
        nearest = above[0].span_id if above else span.parent_id or key
        group = groups.setdefault(nearest, _Group(engine=[], above=above, rooted=rooted))
        group.engine.append(span)
        group.rooted = group.rooted and rooted
    return _with_decode(trace, list(groups.values()))


def _with_decode(trace: SpanTrace, groups: list[_Group]) -> list[_Group]:
    """Join the groups of a prefill and a decode engine behind one router's two calls.

    Both engines' spans then bear one request's id, and stand below one span.
    """
    first = [trace.engine[group.engine[0].span_id] for group in groups]
    of_prefill = [_is_of_prefill(received) for received in first]
    if all(of_prefill) or not any(of_prefill):
        return groups
    by_id: dict[str, _Group] = {}
    for group, received, is_prefill in zip(groups, first, of_prefill, strict=True):
        if not is_prefill and received.request_id:
            by_id[received.request_id] = group
    left: list[_Group] = []
    for group, received, is_prefill in zip(groups, first, of_prefill, strict=True):
        decode = by_id.get(received.request_id) if is_prefill else None
        ids = {span.span_id for span in group.above}
        above = [span for span in decode.above if span.span_id in ids] if decode else []
        if decode and above:
            decode.engine = [*group.engine, *decode.engine]
            decode.above, decode.rooted = above, group.rooted and decode.rooted
        else:
            left.append(group)
    return left


def _is_of_prefill(received: ReceivedSpan | None, stages: Sequence[ReceivedSpan] = ()) -> bool:
    if received is None or received.kind.spans is None:
        return False
    sign = received.kind.spans.roles.get("prefill")
    if sign is None:
        return False
    stated = attributes_of(received.span, sign.values)
    return any(stated.get(name) == value for name, value in sign.values.items()) or any(
        stage.span.name in sign.stages for stage in stages
    )


def _enclosing(trace: SpanTrace, span: ClientSpan) -> list[ClientSpan]:
    """Return the spans that enclose one in time, the shortest first: for spans whose parents did not come."""
    enclosing = [
        candidate
        for key, candidate in trace.spans.items()
        if candidate.encloses and key not in trace.engine and encloses(candidate, span)
    ]
    return sorted(enclosing, key=lambda candidate: candidate.end_ns - candidate.start_ns)


def _client(above: Sequence[ClientSpan], passed: Mapping[bytes, int]) -> ClientSpan | None:
    """Choose the client's span: the outermost call of a model that holds this request alone, else the nearest span."""
    alone = [candidate for candidate in above if passed[candidate.span_id] == 1]
    calls = [candidate for candidate in alone if candidate.is_call]
    return calls[-1] if calls else alone[0] if alone else None


def _stages(trace: SpanTrace, engine: Sequence[ReceivedSpan]) -> tuple[ReceivedSpan, ...]:
    """Return the stages of an engine's request, with the spans that connect them to it; the latter without content."""
    if not trace.stages:
        return ()
    wanted = {step.span.span_id for step in engine}
    spans: dict[bytes, ReceivedSpan] = {}
    for key, stage in trace.stages.items():
        above, _ = chain(trace.spans, trace.spans[key])
        ids = [step.span_id for step in above]
        if wanted.isdisjoint(ids) and len(trace.engine) > 1:
            continue
        spans[key] = stage
        for step in above:
            if step.span_id in wanted:
                break
            if step.span_id not in trace.stages:
                bare = _bare(stage.span.trace_id, step.span_id, step.parent_id, step.start_ns, step.end_ns)
                spans[step.span_id] = replace(stage, received_ns=step.received_ns, span=bare, kind=OTHER)
    return tuple(spans.values())


def own_copy(received: ReceivedSpan) -> ReceivedSpan:
    """Copy a span without its long texts, events and links: one of an export keeps all of the export in memory."""
    span = received.span
    copy = _bare(span.trace_id, span.span_id, span.parent_span_id, span.start_time_unix_nano, span.end_time_unix_nano)
    copy.name = span.name[:_LONGEST_TEXT]
    copy.attributes.extend(
        attribute
        for attribute in span.attributes
        if attribute.value.ByteSize() <= _LONGEST_TEXT and len(attribute.key) <= _LONGEST_TEXT
    )
    return replace(received, span=copy, resource=bare_resource(received.resource))


def _bare(trace_id: bytes, span_id: bytes, parent_id: bytes, start_ns: int, end_ns: int) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=end_ns,
    )
