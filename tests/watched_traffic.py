"""Traffic on the simulated engine in virtual time, as a watch receives it: spans of clients and of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import MS, NOON, S, call, engine, export
from watch_directories import begin

from sidelight.recorded.directory import RAW
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.watch.view import WatchView
from sidelight.simulator.virtual import VirtualExchange


def spans_of(number: int, exchange: VirtualExchange) -> tuple[Span, Span]:
    """Return the span of a client that counts no tokens, and vLLM's."""
    record, trace = exchange.record, (number + 1).to_bytes(16)
    assert record is not None

    def ms(stamp_ns: int) -> float:
        return (stamp_ns - NOON) / MS

    tokens = {"prompt_tokens": float(record.prompt_tokens), "completion_tokens": float(record.output_tokens)}
    first_ms = (exchange.token_ns[0] - exchange.submit_ns) / MS
    return (
        call(trace=trace, first_ms=first_ms, start_ms=ms(exchange.submit_ns), end_ms=ms(exchange.end_ns)),
        engine(
            trace=trace,
            queue_ms=1e3 * record.queue_s,
            prefill_ms=1e3 * record.prefill_s,
            decode_ms=(record.finished_ns - record.first_token_ns) / MS,
            ttft_ms=(record.first_token_ns - record.arrival_ns) / MS,
            e2e_ms=(record.finished_ns - record.arrival_ns) / MS,
            start_ms=ms(record.arrival_ns),
            end_ms=ms(record.finished_ns),
            stated={f"gen_ai.usage.{name}": count for name, count in tokens.items()},
        ),
    )


def exports_of(exchanges: Sequence[VirtualExchange], *, clients: bool = True) -> Iterator[ExportRecord]:
    """Yield an export a second, with the spans that ended in it."""
    ended: dict[int, list[Span]] = {}
    for number, exchange in enumerate(exchanges):
        ended.setdefault((exchange.end_ns - NOON) // S + 1, []).extend(
            spans_of(number, exchange)[0 if clients else 1 :]
        )
    for second in sorted(ended):
        yield export(ended[second], at_s=second)


def watched_directory(path: Path, exchanges: Sequence[VirtualExchange]) -> Path:
    """Write the directory of a watch that saw this traffic."""
    begin(path)
    with closing(SpanLog(path / f"{RAW}/spans-000000.log")) as spans:
        spans.append(StateRecord(at_ns=NOON, state="started", counts=ReceiverCounts()))
        for record in exports_of(exchanges):
            spans.append(record)
    return path


def watching(path: Path, exchanges: Sequence[VirtualExchange], view: WatchView, *, clients: bool = True) -> int:
    """Let a view of a folder see traffic as it comes, and return the moment after it."""
    with closing(SpanLog(path / "spans-000000.log")) as spans:
        polled_ns = NOON
        for record in exports_of(exchanges, clients=clients):
            spans.append(record)
            if record.received_ns > polled_ns + 5 * S:
                polled_ns = record.received_ns
                view.poll(polled_ns)
    after_ns = polled_ns + (5 if clients else 60) * S
    view.poll(after_ns)
    return after_ns
