"""Reading a reply, streamed or whole, from bytes and stamps; what its events mean is each protocol's own.

What counts as content, in every protocol: visible text, reasoning and calls of tools, since the model generated them
and the client waited for them. The first token is the first content that is not blank, at the moment its complete
event was read (draft-gaikwad, sections first-token-def and http-sse). Token counts are the server's, never the number
of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TypeVar

import msgspec

from sidelight.loadgen.http1 import Head, ProtocolError, parse_head
from sidelight.loadgen.protocols.reading.content import is_blank, is_unseen, unseen_places
from sidelight.loadgen.protocols.reading.events import (
    BLANK_LINES,
    NO_BODY,
    NOTHING,
    Segment,
    SseEvent,
    events,
    plain,
    segments,
    unframing,
)
from sidelight.loadgen.protocols.reading.failures import (
    ABORTED,
    CONTENT_FILTER,
    UNREADABLE,
    Payload,
    failure_of,
    server_message,
)
from sidelight.loadgen.protocols.reading.runs import EventRun, PlainEvent
from sidelight.loadgen.protocols.reading.timings import (
    CHANGED,
    FELL,
    UNREADABLE_COUNT,
    ServerTimings,
    counts_of,
    of_headers,
    of_llamacpp,
    succeeded,
)

_Payload = TypeVar("_Payload", bound=Payload)

# Most servers' heads differ by their date alone, once a second.
parse_known_head = lru_cache(maxsize=64)(parse_head)
_DONE = b"[DONE]"
_SSE = "text/event-stream"
_RETRY_CHARS = 40
EMPTY = "the stream ended without any output"


@dataclass(slots=True, kw_only=True)
class ReplyState:
    """The state of one reply's events so far; `texts` is the visible content of choice 0.

    streamed  false of a reply that came whole: its content has no times
    generated whether an event of generated output came, even one without content
    segment   what is read: positions count in its data
    settled   how many contents were of the segments before, whose `ends`, `chars` and `texts` were taken out
    first     which content the first token is, those included
    first_visible  which content is the first that is not reasoning
    choices   the numbers of the choices that brought something, by their indices
    roles     the indices of those whose first event named a role alone
    outputs   where the first and the last output of each of these end in the segment
    choice_of  of which of these each content is
    reasoned  reasoning came as text
    silent    events that brought nothing to show
    unseen    which contents have neither a character that shows nor white space, those settled included
    statements, grew, doubts  how often output tokens were stated, whether they ever rose, what of counts cannot be so
    """

    streamed: bool = True
    generated: bool = False
    segment: Segment = NOTHING
    settled: int = 0
    ends: list[int] = field(default_factory=list)
    chars: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
    roles: set[int] = field(default_factory=set)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    choice_of: list[int] = field(default_factory=list)
    reasoned: bool = False
    number: int = 0
    first: int = -1
    first_visible: int = -1
    first_kind: str = ""
    done_end: int = -1
    input_tokens: int = -1
    output_tokens: int = -1
    cached_tokens: int = -1
    timed_tokens: int = -1
    reasoning_tokens: int = -1
    total_tokens: int = -1
    statements: int = 0
    grew: bool = False
    doubts: dict[str, str] = field(default_factory=dict)
    silent: int = 0
    unseen: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    role_only_first: bool = False
    response_id: str = ""
    timings: ServerTimings | None = None

    def content(self, end: int, text: str, reasoning: str = "", *, tools: bool = False, choice: int = 0) -> None:
        """Add an event; one without content is generated output too. Its data ends at `end`."""
        if not self.streamed:
            return
        number = self._output(choice, end, end)
        if not (text or reasoning or tools):
            self.silent += 1
            return
        if self.first_visible < 0 and (kind := _kind(text, reasoning, tools=tools)):
            self._begin(self.settled + len(self.ends), kind)
        if not tools and is_unseen(text + reasoning):
            self.unseen.append(self.settled + len(self.ends))
        self.reasoned |= reasoning != ""
        self.ends.append(end)
        self.choice_of.append(number)
        self.chars.append(len(text) + len(reasoning))

    def _begin(self, number: int, kind: str) -> None:
        """Record the first token, and the first visible one, unless they are known."""
        if self.first < 0:
            self.first, self.first_kind = number, kind
        if self.first_visible < 0 and kind != "reasoning":
            self.first_visible = number

    def _output(self, choice: int, first_end: int, last_end: int) -> int:
        """Add outputs of one choice, and return its number."""
        self.generated = True
        number = self.choices.setdefault(choice, len(self.choices))
        self.outputs.setdefault(number, [first_end, last_end])[1] = last_end
        return number

    def say(self, end: int, text: str, reasoning: str = "", *, tools: bool = False) -> None:
        """Add content of the only choice."""
        self.content(end, text, reasoning, tools=tools)
        if text:
            self.texts.append(text)

    def say_all(self, run: EventRun, *, reasoning: bool = False, choice: int = 0) -> None:
        """Add events of one frame and one choice."""
        ends, texts = run.ends, run.texts
        if "" in texts:
            ends = [end for end, text in zip(ends, texts, strict=True) if text]
            texts = [text for text in texts if text]
        self.add_run(
            len(run.texts),
            (run.ends[0], run.ends[-1]),
            ends,
            map(len, texts),
            visible=-1
            if self.first_visible >= 0
            else next((at for at, text in enumerate(texts) if not is_blank(text)), -1),
            unseen=unseen_places(texts),
            reasoning=reasoning,
            choice=choice,
        )
        if choice == 0 and not reasoning:
            self.texts += texts

    def add_run(
        self,
        count: int,
        bounds: tuple[int, int],
        ends: Sequence[int],
        chars: Iterable[int],
        *,
        visible: int,
        unseen: Iterable[int],
        reasoning: bool,
        choice: int,
    ) -> None:
        """Add a run of `count` events of one choice; `bounds` are the ends of its first and last.

        Those with text have `ends` and `chars`. Among them `visible` is the place of the first visible one, -1 without
        one, and `unseen` are the places of all unseen ones.
        """
        self.number += count
        number = self._output(choice, *bounds)
        self.silent += count - len(ends)
        before = self.settled + len(self.ends)
        if visible >= 0:
            self._begin(before + visible, "reasoning" if reasoning else "content")
        self.unseen += (before + at for at in unseen)
        self.reasoned |= reasoning and bool(ends)
        self.ends += ends
        self.choice_of += [number] * len(ends)
        self.chars += chars

    def finish(self, reason: str) -> None:
        """Record a choice's finish reason. Of several, a refusal counts first, then one that was given up."""
        if self.finish_reason != CONTENT_FILTER and (reason == CONTENT_FILTER or not self._is_aborted):
            self.finish_reason = reason

    def fail(self, message: str) -> None:
        """Record an error; the first one counts."""
        self.error = self.error or f"server: {message}"

    def count(
        self,
        input_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None = None,
        timed_tokens: int | None = None,
    ) -> None:
        """Record the server's token counts; None leaves the known count unchanged."""
        if output_tokens is not None:
            self.statements += 1
            self.grew |= 0 <= self.output_tokens < output_tokens
            if output_tokens < self.output_tokens:
                self.doubts.setdefault(FELL, f"{FELL}: {output_tokens:,} after {self.output_tokens:,}")
        if input_tokens is not None and self.input_tokens > 0 and input_tokens != self.input_tokens:
            self.doubts.setdefault("input_tokens", f"{CHANGED}: {self.input_tokens:,}, then {input_tokens:,}")
        self.input_tokens = self.input_tokens if input_tokens is None else input_tokens
        self.output_tokens = self.output_tokens if output_tokens is None else output_tokens
        self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens
        self.timed_tokens = self.timed_tokens if timed_tokens is None else timed_tokens

    def usage(self, stated: object) -> None:
        """Record the usage of an OpenAI endpoint. A value in place of a count takes nothing else away."""
        counts = counts_of(stated)
        self.count(counts.input_tokens, counts.output_tokens, counts.cached_tokens)
        self.reasoning_tokens = self.reasoning_tokens if counts.reasoning_tokens is None else counts.reasoning_tokens
        self.total_tokens = self.total_tokens if counts.total_tokens is None else counts.total_tokens
        for name, shown in counts.unreadable.items():
            self.doubts.setdefault(name, f"{name.replace('_', ' ')} {UNREADABLE_COUNT}: {shown}")

    def time(self, stated: ServerTimings | None) -> None:
        """Record the times that the server states; each choice may have its own."""
        if stated is not None:
            alone = len(self.choices) < 2
            self.timings = succeeded(self.timings, stated) if self.timings is not None and alone else stated

    def llamacpp(self, raw: bytes) -> None:
        """Record llama.cpp's `timings`, which have counts of their own."""
        timings, stated = of_llamacpp(raw)
        self.time(timings)
        self.count(None, None, stated.cache_n, stated.predicted_n)

    @property
    def failure(self) -> str:
        """Return the reason for a failed reply as `Reply.error`, else "". It is "" too while the reply goes on."""
        if self.error or not self.has_ended:
            return self.error
        if self._is_aborted:
            return f"aborted: the server ended the reply with finish_reason {self.finish_reason}"
        contents, tokens = self.settled + len(self.ends), max(self.output_tokens, self.timed_tokens)
        unsaid = tokens == 0 or (tokens < 0 and not self.generated and not self.finish_reason)
        if self.streamed and not contents and unsaid and self.finish_reason != CONTENT_FILTER:
            return f"empty: {EMPTY}"
        return ""

    @property
    def _is_aborted(self) -> bool:
        return self.finish_reason.lower() in ABORTED

    @property
    def has_ended(self) -> bool:
        """Return whether a stream's last event came, or a finish reason."""
        return bool((self.streamed and self.done_end >= 0) or self.finish_reason)

    @property
    def complete(self) -> bool:
        """Return whether the reply is complete and did not fail."""
        return self.has_ended and not self.failure

    @property
    def text(self) -> str | None:
        """The visible content of choice 0, without reasoning and tool calls; None when the reply failed or is torn.

        It is what a session's next turn carries: models are not shown their own earlier reasoning.
        """
        return "".join(self.texts) if self.complete else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a protocol's replies.

    kinds     content types of its streams
    split     the events of a stream from a position on
    breaks    what stands between two events, each of them, so that a stream may be cut behind it
    run       read what follows an event of a stream at once, where that is possible: return where it ends, else -1
    plain     the meaning of an event's data that holds nothing but PROBE as its text, else None; with it, whole replies
              are read many at once (`batch`), as far as their events are lines of data
    messages  each read is an event, of a transport that delivers messages; then `kinds` and `split` count for nothing
    take      add one event of a stream, or a reply that came whole, to what was seen; raises what UNREADABLE lists
    """

    kinds: frozenset[str] = frozenset({_SSE})
    split: Callable[[bytes, int], Iterator[SseEvent]] = events
    breaks: tuple[bytes, ...] = BLANK_LINES
    run: Callable[[ReplyState, bytes, SseEvent], int] | None = None
    plain: Callable[[bytes], PlainEvent | None] | None = None
    messages: bool = False
    take: Callable[[ReplyState, SseEvent], None]


def reader(
    kind: type[_Payload], take: Callable[[ReplyState, _Payload, int], None]
) -> Callable[[ReplyState, SseEvent], None]:
    """Return `Form.take` for events in JSON: `take` gets those that are no error, and the position behind them."""
    decode = msgspec.json.Decoder(kind).decode

    def read(seen: ReplyState, event: SseEvent) -> None:
        if event.name == "error":
            seen.fail(server_message(event.data))
            return
        payload = decode(event.data)
        if (message := failure_of(payload, event.data)) is not None:
            seen.fail(message)
        else:
            take(seen, payload, event.end)

    return read


def reading(
    seen: ReplyState, form: Form, http_status: int, head: bytes, pieces: Iterable[tuple[bytes, Iterable[int]]]
) -> Iterator[bool]:
    """Read a reply into `seen` from pieces of its body on the wire.

    Each piece comes with its reads: its length after each. Of a transport that delivers messages, each read is one.

    Pauses behind each event of a stream, False, and when all of `seen.segment` has been read, True. Ends where the
    framing is off, and where an event is too large.
    """
    if form.messages:
        yield from _messages(seen, form, http_status, pieces)
        return
    try:
        parsed = parse_known_head(head)
        unframe = unframing(parsed)
        bodies = (unframe(wire) for wire, _ in pieces)
        first = next(bodies, NO_BODY)
        kind = content_type(parsed)
        if http_status == 200 and (kind in form.kinds or (not kind and first.data.lstrip()[:1] != b"{")):
            yield from _stream(seen, form, segments(chain([first], bodies), form.breaks))
        else:
            # Of an error the beginning says enough.
            rest = bodies if http_status == 200 else ()
            yield from _whole(seen, form, http_status, parsed, segments(chain([first], rest), ()))
    except ProtocolError as error:
        seen.error = f"protocol: {error}"


def content_type(head: Head) -> str:
    """Return the content type of a reply without its parameters."""
    return head.headers.get("content-type", "").partition(";")[0].strip().lower()


def _whole(seen: ReplyState, form: Form, http_status: int, head: Head, parts: Iterator[Segment]) -> Iterator[bool]:
    """Read a reply in one piece, when all of it has come."""
    for seen.segment in parts:
        if not seen.segment.is_last:
            yield True
    seen.streamed, seen.done_end = False, 0
    data, kind = seen.segment.data, content_type(head)
    if http_status != 200:
        wait = head.headers.get("retry-after")
        later = "" if wait is None else f" (Retry-After: {wait[:_RETRY_CHARS]})"
        seen.error = f"http_{http_status}: {server_message(data)}{later}"
    elif kind not in {"", "application/json"}:
        seen.error = f"protocol: the reply is {kind}, not an event stream"
    else:
        try:
            form.take(seen, SseEvent("", data, len(data)))
            seen.done_end = len(data)
        except UNREADABLE as error:
            seen.error = f"protocol: not a completion: {error}"
        seen.timings = seen.timings or of_headers(head.headers)
    yield True


def _stream(seen: ReplyState, form: Form, parts: Iterator[Segment]) -> Iterator[bool]:
    beginning = b""
    for seen.segment in parts:
        yield from _events(seen, form, seen.segment.data)
        if seen.number == 0:
            beginning = beginning or seen.segment.data.lstrip()[:1]
        yield True
    # A JSON line that is not whole yet does not make a reply of another kind.
    if seen.number == 0 and (beginning == b"<" or (beginning == b"{" and _SSE in form.kinds)):
        seen.error = "protocol: the reply is not an event stream"


def _events(seen: ReplyState, form: Form, data: bytes) -> Iterator[bool]:
    source = form.split(data, 0)
    while (event := next(source, None)) is not None:
        if not take_event(seen, form, event):
            continue
        yield False
        if form.run is not None and (at := form.run(seen, data, event)) >= 0:
            source = form.split(data, at)
            yield False


def _messages(
    seen: ReplyState, form: Form, status: int, pieces: Iterable[tuple[bytes, Iterable[int]]]
) -> Iterator[bool]:
    """Read a reply of messages; what came instead of the first one is the server's message for a refusal."""
    begin = 0
    for data, ends in pieces:
        seen.segment = Segment(data=data, begin=begin, piece=plain(data), is_last=False)
        if status != 200:
            break
        at = 0
        for end in ends:
            _take(seen, form, SseEvent("", data[at:end], end))
            at = end
            if seen.done_end >= 0:
                break
            yield False
        yield True
        if seen.done_end >= 0:
            return
        begin += len(data)
    if status != 200:
        seen.streamed, seen.done_end = False, 0
        seen.error = f"http_{status}: {server_message(seen.segment.data)}"
        yield True


def take_event(seen: ReplyState, form: Form, event: SseEvent) -> bool:
    """Add one event of a stream; return False for the stream's last event, [DONE]."""
    # What follows the last event is read too: what a server generates behind it takes its time.
    if event.data.strip() == _DONE:
        seen.done_end = event.end if seen.done_end < 0 else seen.done_end
        return False
    _take(seen, form, event)
    return True


def _take(seen: ReplyState, form: Form, event: SseEvent) -> None:
    done_end = seen.done_end
    try:
        form.take(seen, event)
        seen.done_end = seen.done_end if done_end < 0 else done_end
    except UNREADABLE as error:
        if done_end < 0:
            seen.error = seen.error or f"protocol: event {seen.number} is not a completion chunk: {error}"
    seen.number += 1


def _kind(text: str, reasoning: str, *, tools: bool) -> str:
    """Return the kind of a content; "" when it is blank."""
    if not is_blank(text):
        return "content"
    if not is_blank(reasoning):
        return "reasoning"
    return "tool" if tools else ""
