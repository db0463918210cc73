"""The OTLP receiver over real sockets: what engines send is logged, and anything else disturbs nothing."""

from __future__ import annotations

import asyncio
import base64
import errno
import gzip
import json
import lzma
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from odd_exports import PROTOBUF, counted, odd_export, over_grpc, over_http
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from sent_spans import MS, NOON, SERVER, body, span, two_pods
from waiting import BOUND_S

from sidelight.rundir.frames import read_frames
from sidelight.scraper.spans.log import (
    ExportRecord,
    ReceiverCounts,
    SpanLog,
    SpanLogRecord,
    StateRecord,
    decode,
    packed,
)
from sidelight.scraper.spans.received import OFF_CLOCK
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.spans.spec import CannotListen, ReceiverSpec

MB = 1 << 20


@dataclass(slots=True)
class Listening:
    """A receiver, its log, and what it said."""

    path: Path
    said: list[str] = field(default_factory=list)
    receiver: Receiver = field(init=False)

    async def over_http(self, body: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, bytes]:
        return await over_http(self.receiver.http_port, body, **headers)

    async def over_grpc(self, body: bytes, compression: grpc.Compression = grpc.Compression.NoCompression) -> bytes:
        return await over_grpc(self.receiver.grpc_port, body, compression)

    async def send(self, via: str, body: bytes) -> bytes:
        """Send an export over grpc or http, plain or packed by gzip."""
        wire, _, packing = via.partition(" ")
        if wire == "grpc":
            return await self.over_grpc(body, grpc.Compression.Gzip if packing else grpc.Compression.NoCompression)
        headers = {"Content_Encoding": "gzip"} if packing else {}
        status, reply = await self.over_http(gzip.compress(body) if packing else body, **headers)
        assert 200 == status
        return reply

    def records(self) -> list[SpanLogRecord]:
        return [decode(payload) for payload in read_frames(self.path)]

    def bodies(self) -> list[bytes]:
        return [record.body() for record in self.records() if isinstance(record, ExportRecord)]


@asynccontextmanager
async def listening(
    path: Path, now_ns: int = 10**18, wall_ns: Callable[[], int] = time.time_ns, **spec: object
) -> AsyncIterator[Listening]:
    log = SpanLog(path / "spans.log")
    listener = Listening(path / "spans.log")
    offset_ns = now_ns - time.monotonic_ns()
    whole = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "clock_offset_ns": offset_ns, **spec}
    try:
        checked = ReceiverSpec(**whole)  # type: ignore[arg-type]
        async with Receiver(checked, log=log, say=listener.said.append, wall_ns=wall_ns) as listener.receiver:
            yield listener
    finally:
        log.close()


@pytest.fixture(scope="session")
def exports() -> list[bytes]:
    """Every export of a real vLLM in the recording `edges`, as it came."""
    with lzma.open(Path(__file__).parents[2] / "data/vllm_edges_spans.jsonl.xz", "rt") as file:
        lines = [json.loads(line) for line in file]
    return [base64.b64decode(line["export"]["body_b64"]) for line in lines if "export" in line]


export = partial(odd_export, 10**18 + 1)


@pytest.mark.parametrize("via", ["grpc", "grpc gzip", "http", "http gzip"])
async def test_what_an_engine_sent_is_what_is_logged(tmp_path: Path, exports: Sequence[bytes], via: str):
    """Byte for byte, over either wire, packed or not; each export is acknowledged when it is logged, and counted."""
    recorded_ns = max(received.span.end_time_unix_nano for body in exports for received in packed(0, via, body).spans())
    async with listening(tmp_path, now_ns=recorded_ns) as listener:
        for number, body in enumerate(exports):
            assert b"" == await listener.send(via, body)
            assert number + 1 == len(listener.bodies())
    assert list(exports) == listener.bodies()
    assert [] == listener.said
    counts = listener.receiver.counts()
    assert counts == ReceiverCounts(exports=len(exports), spans=69)
    assert {via.partition(" ")[0]} == {record.via for record in listener.records() if isinstance(record, ExportRecord)}
    assert 57 == len(engine_spans(listener.records()))


async def test_exports_have_the_runs_clock_and_are_delivered(tmp_path: Path):
    """The stamp is by the run's clock; `deliver` gets each export as it comes, with the same stamp."""
    given: list[tuple[int, int]] = []
    log = SpanLog(tmp_path / "spans.log")
    spec = ReceiverSpec(grpc="", http="127.0.0.1:0", clock_offset_ns=10**18)

    def deliver(received_ns: int, request: ExportTraceServiceRequest) -> None:
        given.append((received_ns, len(request.resource_spans)))

    listener = Listening(tmp_path / "spans.log")
    async with Receiver(spec, log=log, say=listener.said.append, deliver=deliver) as listener.receiver:
        assert 0 == listener.receiver.grpc_port
        await listener.over_http(export())
    log.close()
    (record,) = (record for record in listener.records() if isinstance(record, ExportRecord))
    assert [(record.received_ns, 1)] == given
    assert 10**18 < record.received_ns < 2 * 10**18


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b"\xff" * 100, {}, 400, "it is not an ExportTraceServiceRequest"),
        (export()[:-3], {}, 400, "it is not an ExportTraceServiceRequest"),
        (b"{}", {"Content_Type": "application/json"}, 415, "it is application/json, not application/x-protobuf"),
        (export(), {"Content_Encoding": "br"}, 415, "encoded as 'br'"),
        (b"\x0a\x00" * 600_000, {}, 413, "more than 1000000 bytes"),
        (gzip.compress(bytes(16 * MB), mtime=0), {"Content_Encoding": "gzip"}, 413, "more than 1000000 bytes"),
        (b"\x0a\xa4\x96\x03\x12\xa0\x96\x03" + b"\x12\x00" * 26_000, {}, 413, "more than 20000 spans at once"),
    ],
    ids=["garbage", "cut off", "json", "br", "large", "bomb", "empty spans"],
)
async def test_an_invalid_export_is_refused_with_a_reason(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, reason: str
):
    """Over HTTP: the reply says why, it is counted each time and logged once, and the next export passes."""
    async with listening(tmp_path, limit_bytes=1_000_000) as listener:
        for _ in range(2):
            assert (status, b"\x12" + bytes([len(reason)]) + reason.encode()) == await listener.over_http(
                body, **headers
            )
        assert (200, b"") == await listener.over_http(export())
    counts = listener.receiver.counts()
    assert (2, 1) == (counts.malformed + counts.too_large, counts.exports)
    assert [
        f"an export of spans over http is refused: {reason} (said once; the counts show how often)"
    ] == listener.said
    assert [export()] == listener.bodies()


@pytest.mark.parametrize(
    ("body", "packing", "code", "count"),
    [
        (b"\xff" * 100, grpc.Compression.NoCompression, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        (bytes(8 * MB), grpc.Compression.NoCompression, grpc.StatusCode.RESOURCE_EXHAUSTED, "too_large"),
        (bytes(16 * MB), grpc.Compression.Gzip, grpc.StatusCode.RESOURCE_EXHAUSTED, "too_large"),
    ],
    ids=["garbage", "large", "bomb"],
)
async def test_an_invalid_export_is_refused_over_grpc_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: bytes, packing: grpc.Compression, code: object, count: str
):
    """With the code that OTLP has for it, counted each time, said once, and with nothing on standard error."""
    async with listening(tmp_path) as listener:
        for _ in range(2):
            with pytest.raises(aio.AioRpcError) as refused:
                await listener.over_grpc(body, packing)
            assert code == refused.value.code()
        assert b"" == await listener.over_grpc(export())
    assert listener.receiver.counts() == ReceiverCounts(**{"exports": 1, "spans": 1, count: 2})
    assert 1 == len(listener.said)
    assert ("", "") == capfd.readouterr()


async def test_a_body_of_200_mb_is_not_read(tmp_path: Path):
    """One without a length is read up to the limit; the rest of it takes no memory."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield bytes(MB)

    async with listening(tmp_path) as listener:
        status, _ = await listener.over_http(body())
    assert 413 == status
    assert listener.receiver.counts() == ReceiverCounts(too_large=1)
    assert [] == listener.bodies()


async def test_what_speaks_neither_protocol_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Noise on either port ends its own connection, and nothing else; it is said in one line, not in tracebacks."""
    async with listening(tmp_path) as listener:
        for port in (listener.receiver.grpc_port, listener.receiver.http_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01\x00\xffnoise\r\n\r\n" * 4)
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), BOUND_S)
            writer.close()
            await writer.wait_closed()
        head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.receiver.http_port)
        writer.write(head.encode() + b"5\r\nabc")
        writer.write(b"deXX\r\n")
        writer.write_eof()
        await asyncio.wait_for(reader.read(), BOUND_S)
        writer.close()
        await writer.wait_closed()
        await listener.send("grpc", export())
        await listener.send("http", export())
    assert 2 == listener.receiver.counts().exports
    assert 1 <= listener.receiver.counts().malformed
    assert [] == caplog.records
    assert 1 <= len(listener.said) <= 2
    assert all("\n" not in line for line in listener.said)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (export(trace_id=b"t"), "no valid trace id"),
        (export(trace_id=bytes(16)), "no valid trace id"),
        (export(span_id=b""), "no valid span id"),
        (export(parent_span_id=b"p" * 9), "no valid parent span id"),
        (export(start_time_unix_nano=2, end_time_unix_nano=1), "an end before its start"),
        (export(end_time_unix_nano=2**64 - 1), "an end before its start"),
        (export(attributes=10_000), "more than 1024 attributes"),
    ],
    ids=["short trace", "no trace", "no span", "parent", "backwards", "beyond time", "attributes"],
)
async def test_a_bad_span_is_logged_but_never_used(tmp_path: Path, bad: bytes, reason: str):
    """The reply says so as OTLP has it (partial success); counted, logged once; the spans around it are used."""
    async with listening(tmp_path) as listener:
        for _ in range(2):
            answer = ExportTraceServiceResponse.FromString(await listener.send("grpc", bad))
            assert (1, reason) == (answer.partial_success.rejected_spans, answer.partial_success.error_message)
        assert b"" == await listener.send("http", export())
    assert listener.receiver.counts() == ReceiverCounts(exports=3, spans=3, bad_spans=2)
    assert [f"spans that came over grpc are not used: {reason} (said once; the counts show how often)"] == listener.said
    spans = engine_spans(listener.records())
    assert (1, {reason: 2}) == (len(spans), spans.refused)


@pytest.mark.parametrize(("off_s", "where"), [(3600, "ahead of"), (-3600, "behind"), (-610, "behind")])
async def test_a_span_by_another_clock_is_logged_but_never_used(tmp_path: Path, off_s: int, where: str):
    """The reply says so; it is counted, and logged once with its service and the cure. Only its ids are used."""
    stamp_ns = 10**18 + off_s * 10**9
    bad = export(service="vllm\n", start_time_unix_nano=stamp_ns, end_time_unix_nano=stamp_ns + 1, trace_id=b"o" * 16)
    async with listening(tmp_path) as listener:
        for _ in range(2):
            answer = ExportTraceServiceResponse.FromString(await listener.send("grpc", bad))
            assert (1, OFF_CLOCK) == (answer.partial_success.rejected_spans, answer.partial_success.error_message)
        assert b"" == await listener.send("http", export())
    assert listener.receiver.counts() == ReceiverCounts(exports=3, spans=3, off_clock=2)
    (said,) = listener.said
    assert (
        f"spans of 'vllm\\n' that came over grpc are not used: their clock is SOME s {where} ours; set it right on "
        "that machine (NTP) (said once; the counts show how often)"
    ) == re.sub(r"\d+ s", "SOME s", said)
    assert pytest.approx(abs(off_s), abs=60) == int(re.findall(r"(\d+) s", said)[0])
    spans = engine_spans(listener.records())
    assert ([(b"o" * 16).hex(), (b"t" * 16).hex()], {OFF_CLOCK: 2}) == (list(spans.trace_id), spans.refused)
    minutes = int(re.findall(r"(\d+) min off ours", spans.fault[0])[0])
    assert (pytest.approx(abs(off_s) / 60, abs=1.5), "") == (minutes, spans.fault[1])
    assert (-1, -1, True) == (spans.arrival_ns[0], spans.end_ns[0], bool(np.isnan(spans.queue_s[0])))


async def test_no_sender_is_blamed_where_our_own_clock_was_set(tmp_path: Path):
    """Such spans are not used, and the message says whose clock moved."""
    moved_s = 0
    async with listening(tmp_path, wall_ns=lambda: time.time_ns() + moved_s * 10**9) as listener:
        moved_s = 3600
        stamp_ns = 10**18 + moved_s * 10**9
        await listener.send("grpc", export(start_time_unix_nano=stamp_ns, end_time_unix_nano=stamp_ns + 1))
    assert 1 == listener.receiver.counts().off_clock
    (said,) = listener.said
    assert "are not used: the clock of this machine was set by +3600 s since the receiver began" in said


@pytest.mark.parametrize(
    ("off_s", "why"),
    [
        (7200, "their clock is 7200 s ahead of ours; set it right"),
        (-3600, "they are from before the clock of this machine"),
    ],
)
async def test_a_sender_is_blamed_for_what_no_step_of_ours_explains(tmp_path: Path, off_s: int, why: str):
    """Our clock was set by an hour before this receiver began: what spans made before that lack is ours."""
    async with listening(tmp_path, clock_step_ns=3600 * 10**9) as listener:
        stamp_ns = 10**18 + off_s * 10**9
        await listener.send("grpc", export(start_time_unix_nano=stamp_ns, end_time_unix_nano=stamp_ns + 1))
    assert f"are not used: {why}" in listener.said[0]


async def test_exports_are_turned_away_until_a_receiver_with_the_new_time_is_there(tmp_path: Path):
    """Where another follows: nothing is logged by the old time once the clock was set, and senders try again."""
    moved_s = 0
    async with listening(
        tmp_path, wall_ns=lambda: time.time_ns() + moved_s * 10**9, restarts_at_clock_step=True
    ) as listener:
        assert b"" == await listener.send("http", export())
        moved_s = -2
        assert 503 == (await listener.over_http(export()))[0]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await listener.over_grpc(export())
    assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
    assert listener.receiver.counts() == ReceiverCounts(exports=1, spans=1, turned_away=2)
    assert 1 == len(listener.bodies())


async def test_a_receiver_that_no_run_waits_for_notes_no_traces(tmp_path: Path):
    """That of a watch: what 100,000 of them take, 40 MB, is for a run's end alone."""
    root, waiting, forward = (
        export(name=" Req rid-1", module="sglang::request"),
        export(name="prefill_waiting", span_id=b"waiting "),
        export(name="prefill_forward", span_id=b"forward "),
    )
    for is_awaited in (True, False):
        async with listening(tmp_path, is_awaited=is_awaited) as listener:
            for body_ in (root, waiting, forward):
                await listener.send("grpc", body_)
            assert int(not is_awaited) == await listener.receiver.settle(0, [(b"t" * 16).hex()])


async def test_a_clock_that_is_minutes_off_is_used(tmp_path: Path):
    """Where stamps are compared its offset is estimated; nor is what an exporter keeps back for minutes a fault."""
    stamp_ns = 10**18 - 500 * 10**9
    async with listening(tmp_path) as listener:
        assert b"" == await listener.send(
            "grpc", export(start_time_unix_nano=stamp_ns, end_time_unix_nano=stamp_ns + 1)
        )
    assert (listener.receiver.counts(), listener.said) == (ReceiverCounts(exports=1, spans=1), [])
    assert [stamp_ns] == engine_spans(listener.records()).arrival_ns.tolist()


async def test_settling_ends_when_the_wanted_spans_are_there(tmp_path: Path):
    """Not before the last of them, and long before the bound; the log says that it settled."""
    first, last = (b"1" * 16).hex(), (b"2" * 16).hex()
    async with listening(tmp_path) as listener:
        await listener.send("grpc", export(trace_id=b"1" * 16))
        async with asyncio.timeout(BOUND_S):
            settling = asyncio.create_task(listener.receiver.settle(60, [first, last]))
            await listener.send("grpc", export(trace_id=b"2" * 16))
            assert 0 == await settling
        assert ["started", "settled"] == [state.state for state in listener.records() if isinstance(state, StateRecord)]


async def test_settling_waits_for_gateways_where_they_send_spans(tmp_path: Path):
    """Of each trace those of every service before the engine: a gateway's exporter is another than the engine's."""
    traces = [bytes([number]) * 16 for number in (1, 2)]
    clock_ms = (10**18 - NOON) / 1e6
    served = [body([span("POST", "gw", kind=SERVER, trace=trace, clock_ms=clock_ms)], service="gw") for trace in traces]
    async with listening(tmp_path) as listener:
        for trace in traces:
            await listener.send("grpc", export(trace_id=trace))
        await listener.send("grpc", served[0])
        async with asyncio.timeout(BOUND_S):
            settling = asyncio.create_task(listener.receiver.settle(60, [trace.hex() for trace in traces]))
            await asyncio.sleep(0)
            assert not settling.done()
            await listener.send("grpc", served[1])
            assert 0 == await settling


async def test_settling_waits_for_both_of_two_engines_that_share_requests(tmp_path: Path):
    """That they do is known by the first request of which both spans came."""
    traces = [bytes([number]) * 16 for number in (1, 2)]
    clock_ms = (10**18 - NOON) / 1e6
    pods = [two_pods(trace=trace) for trace in traces]
    for span_ in (pod for pair in pods for pod in pair):
        span_.start_time_unix_nano += round(clock_ms * MS)
        span_.end_time_unix_nano += round(clock_ms * MS)
    async with listening(tmp_path) as listener:
        await listener.send("grpc", body([prefill for prefill, _ in pods], instance="prefill"))
        await listener.send("grpc", body([pods[0][1]], instance="decode"))
        async with asyncio.timeout(BOUND_S):
            settling = asyncio.create_task(listener.receiver.settle(60, [trace.hex() for trace in traces]))
            await asyncio.sleep(0)
            assert not settling.done()
            await listener.send("grpc", body([pods[1][1]], instance="decode"))
            assert 0 == await settling


async def test_a_request_in_stages_is_there_with_the_last_of_them(tmp_path: Path):
    """SGLang's processes export by themselves: its request's span and that of the prefill, whichever comes first."""
    root = export(name=" Req rid-1", module="sglang::request")
    waiting, forward = (export(name=f"prefill_{name}", span_id=f"{name:8}".encode()) for name in ("waiting", "forward"))
    for order in ((waiting, forward, root), (root, waiting, forward)):
        async with listening(tmp_path) as listener:
            for body, expected in zip(order, (1, 1, 0), strict=True):
                await listener.send("grpc", body)
                assert expected == await listener.receiver.settle(0, [(b"t" * 16).hex()])


async def test_settling_has_a_bound(tmp_path: Path):
    """Beyond it nothing is awaited: it returns how many of the wanted never came; other spans do not count."""
    async with listening(tmp_path) as listener:
        await listener.send("grpc", export())
        assert 1 == await listener.receiver.settle(0.02, ["00" * 15 + "01"])
        assert 0 == await listener.receiver.settle(0.02)


async def test_an_address_in_use_is_named(tmp_path: Path):
    """Whichever of the two it is; and the log has no receiver that never ran."""
    async with listening(tmp_path) as listener:
        for wire, port in (("grpc", listener.receiver.grpc_port), ("http", listener.receiver.http_port)):
            with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}"):
                async with listening(tmp_path, **{wire: f"127.0.0.1:{port}"}):
                    pass
    assert (ReceiverCounts(), 0) == counted(listener.records())
    with pytest.raises(ValueError, match="'4317' is not HOST:PORT"):
        Receiver(ReceiverSpec(grpc="4317"), log=None, say=print)


async def test_a_log_that_cannot_be_written_turns_exports_away(tmp_path: Path):
    """So that their sender keeps them and comes again; it is counted and said once."""
    path = tmp_path / "spans.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log, listener = SpanLog(path), Listening(path)
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0")

    async with Receiver(spec, log=log, say=listener.said.append) as listener.receiver:
        os.close(reader)
        assert 503 == (await listener.over_http(export()))[0]
        with pytest.raises(aio.AioRpcError) as refused:
            await listener.over_grpc(export())
        assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
    log.close()
    assert listener.receiver.counts() == ReceiverCounts(turned_away=2, unwritten=2)
    reason = "it cannot be logged: Broken pipe (said once; the counts show how often)"
    assert [f"an export of spans over http is refused: {reason}"] == listener.said


async def test_what_was_refused_on_a_full_disk_is_recorded_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Though nothing comes any more: the page of a watch has the counts of the log."""
    monkeypatch.setattr("sidelight.scraper.spans.receiver._COUNT_EVERY_S", 0.01)
    refused: list[SpanLogRecord] = []
    append, is_full = SpanLog.append, True

    def append_if_room(log: SpanLog, record: SpanLogRecord) -> None:
        if is_full and listener.receiver.counts() != ReceiverCounts():
            refused.append(record)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(log, record)

    def states() -> list[StateRecord]:
        return [record for record in listener.records() if isinstance(record, StateRecord)]

    async with listening(tmp_path) as listener:
        with monkeypatch.context() as full:
            full.setattr(SpanLog, "append", append_if_room)
            assert 400 == (await listener.over_http(b"\xff"))[0]
            async with asyncio.timeout(BOUND_S):
                while not refused:  # noqa: ASYNC110  the receiver's task
                    await asyncio.sleep(0.01)
            assert [ReceiverCounts()] == [state.counts for state in states()]
            is_full = False
            async with asyncio.timeout(BOUND_S):
                while len(states()) < 2:  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.01)
        assert ReceiverCounts(malformed=1) == states()[-1].counts


async def test_a_receiver_that_died_is_known_by_its_log(tmp_path: Path):
    """One that began again without an end was killed; what both have counted adds up."""
    async with listening(tmp_path) as listener:
        await listener.send("http", export())
        await listener.receiver.settle(0)
        killed = listener.path.read_bytes()
    listener.path.write_bytes(killed)
    async with listening(tmp_path) as again:
        await again.send("http", export())
    assert (ReceiverCounts(exports=2, spans=2), 1) == counted(again.records())
