"""Recorded streams of a real vLLM, as bytes on the wire and through the log: the log has what the recorder saw.

The recordings hold when each event came, in which read, its characters and the tokens so far, and no text: the bytes
are made from that, in vLLM's own form.
"""

from __future__ import annotations

import gzip
import json
import re
from array import array
from pathlib import Path

import numpy as np
import pytest

from sidelight.loadgen import records
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.transports.packing import pack

SCENARIOS = ("main", "edges", "multi_api_server", "engine_death")
READS_A_PART = 16
# How the recorder names what ended a request before its reply did, and how our transport does.
CANCELLED = {"client_cancelled": "cancelled: the drain bound was reached"}
GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


def _lines(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _streams(recorded: Path, scenario: str) -> list[dict]:
    return _lines(recorded / scenario / "requests.jsonl.gz")


def _framed(payload: str) -> bytes:
    data = f"data: {payload}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(request: dict, event: list) -> str:
    """One event in vLLM's words; `continuous_usage_stats` was asked for where the recording has tokens so far."""
    _, _, index, characters, so_far, role_only = event
    if "chat" in request["path"]:
        choice = {"delta": {"role": "assistant", "content": ""} if role_only else {"content": "x" * characters}}
    else:
        choice = {"text": "x" * characters}
    payload = {"id": request["response_id"], "choices": [{"index": index, **choice, "finish_reason": None}]}
    if so_far is not None:
        payload["usage"] = {
            "prompt_tokens": (request["usage"] or {}).get("prompt_tokens", 1),
            "completion_tokens": so_far,
        }
    return json.dumps(payload)


def _end(request: dict) -> bytes:
    """Return what came behind the events, if anything did: the end of a reply, or a dying engine's error."""
    if request["usage"]:
        finish = {"index": 0, "delta": {}, "text": "", "finish_reason": request["finish_reason"]}
        last = {"choices": [], "usage": request["usage"], "metrics": request.get("server_metrics")}
        said = [json.dumps({"choices": [finish]}), json.dumps(last), "[DONE]"]
        return b"".join(map(_framed, said)) + b"0\r\n\r\n"
    return b"" if request["error"] in CANCELLED else _framed(request["error"]) + b"0\r\n\r\n"


def _reads(request: dict) -> list[tuple[int, bytes]]:
    """The body as it came: a stamp and the bytes of each read."""
    if request["status"] != 200:
        return [(request["done_ns"], request["error"].encode())]
    if not request["stream"]:
        said = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": request["finish_reason"]}
        totals = {"usage": request["usage"], "metrics": request["server_metrics"]}
        return [(request["done_ns"], json.dumps({"id": request["response_id"], "choices": [said], **totals}).encode())]
    reads: dict[int, tuple[int, bytes]] = {}
    for event in request["events"]:
        stamp, number = event[0], event[1]
        reads[number] = (stamp, reads.get(number, (0, b""))[1] + _framed(_event(request, event)))
    end = _end(request)
    return [*reads.values(), *([(request["done_ns"], end)] if end else [])]


def _head(request: dict) -> bytes:
    if request["status"] == 200 and request["stream"]:
        fields = "Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked"
    else:
        fields = "Content-Type: application/json"
    return f"HTTP/1.1 {request['status']} X\r\nserver: uvicorn\r\n{fields}\r\n\r\n".encode()


def _parts(index: int, request: dict) -> list[records.RequestPart]:
    """What a worker logs of it, some reads a part; of a request without a connection its error alone."""
    reads = _reads(request) if request["status"] else []
    error = CANCELLED.get(request["error"], "") if request["status"] else f"connect: {request['error']}"
    parts = []
    for seq, begin in enumerate(range(0, max(len(reads), 1), READS_A_PART)):
        part_reads = reads[begin : begin + READS_A_PART]
        ends = array("q", np.cumsum([len(data) for _, data in part_reads], dtype=np.int64).tolist())
        packed = pack(array("q", [stamp for stamp, _ in part_reads]), ends, b"".join(data for _, data in part_reads))
        last = begin + READS_A_PART >= len(reads)
        parts.append(
            records.RequestPart(
                index=index, seq=seq, last=last, worker=0, url="http://h" + request["path"], scheduled_ns=1,
                dispatch_ns=1, connected_ns=1, submit_ns=request["submit_ns"], reused=True,
                status=request["status"] or 0, head=_head(request) if request["status"] and seq == 0 else b"",
                reads_ns=packed.reads_ns, read_ends=packed.read_ends, body=packed.body, packing=packed.packing,
                end_ns=request["done_ns"] or 2 if last else -1, error=error if last else "",
            )
        )  # fmt: skip
    return parts


def _logged(streams: list[dict]) -> RequestLog:
    return assemble([], (part for at, stream in enumerate(streams) for part in _parts(at, stream)), run_id="r")


def _expected_status(request: dict) -> str:
    if request["usage"]:
        return "ok"
    if request["error"] in CANCELLED:
        return "cancelled"
    return "refused" if 400 <= (request["status"] or 0) < 500 else "failed"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_log_has_how_each_request_ended(recorded: Path, scenario: str):
    """Ok, cancelled, refused with the server's words, failed under 200 with a dying engine's, not connected."""
    streams = _streams(recorded, scenario)
    got = _logged(streams)

    assert [_expected_status(stream) for stream in streams] == got.status.tolist()
    assert [stream["status"] or 0 for stream in streams] == got.http_status.tolist()
    assert [stream["finish_reason"] or "" for stream in streams] == got.finish_reason.tolist()
    for request, error in zip(streams, got.error, strict=True):
        if request["usage"]:
            assert error == ""
        elif request["status"] == 200 and request["error"] not in CANCELLED:
            assert error.startswith("server: EngineCore encountered an issue")
        elif request["status"] and request["error"] not in CANCELLED:
            assert error.startswith(f"http_{request['status']}: ")
            assert error.partition(": ")[2][:40] in request["error"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_are_the_servers(recorded: Path, scenario: str):
    """Usage of what finished, whether it came in chunks or whole, for one choice or three.

    Of what was cut off: the tokens of its last event.
    """
    streams = _streams(recorded, scenario)
    got = _logged(streams)

    finished = [at for at, stream in enumerate(streams) if stream["usage"]]
    assert len(finished) > 20
    assert [streams[at]["usage"]["completion_tokens"] for at in finished] == got.output_tokens[finished].tolist()
    assert [streams[at]["usage"]["prompt_tokens"] for at in finished] == got.input_tokens[finished].tolist()
    for at, request in enumerate(streams):
        if not request["usage"]:
            so_far = [event[4] for event in request["events"] if event[4] is not None]
            assert (so_far[-1] if so_far else -1) == got.output_tokens[at]


@pytest.mark.parametrize("scenario", ["main", "multi_api_server"])
def test_all_tokens_together_are_what_the_engine_counted(recorded: Path, scenario: str):
    """Where every request finished, the log's tokens sum to the generation_tokens_total of the last page."""
    pages = [line["body"] for line in _lines(recorded / scenario / "scrapes.jsonl.gz") if line.get("body")]
    generated = sum(map(float, GENERATED.findall(pages[-1])))

    assert generated == _logged(_streams(recorded, scenario)).output_tokens.sum()


@pytest.mark.parametrize("scenario", ["main", "edges"])
def test_the_engines_own_times_are_in_the_log(recorded: Path, scenario: str):
    """Of each reply whose last event had `metrics`, and of no other."""
    streams = _streams(recorded, scenario)
    got = _logged(streams)
    names = {
        "server_queue_ms": "queue_time_ms",
        "server_prefill_ms": "time_to_first_token_ms",
        "server_decode_ms": "generation_time_ms",
    }

    for column, name in names.items():
        reported = [(stream.get("server_metrics") or {}).get(name, np.nan) for stream in streams]
        np.testing.assert_array_equal(np.array(reported, np.float64), getattr(got, column), column)
    assert ["vllm" if stream.get("server_metrics") else "" for stream in streams] == got.timings_source.tolist()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_have_the_recorders_times(recorded: Path, scenario: str):
    """Each event with text, those of one read alike; before them, maybe, the first that the model generated: empty."""
    streams = _streams(recorded, scenario)
    got = _logged(streams)

    for at, request in enumerate(streams):
        shown = [event[0] for event in request["events"] if event[3] > 0]
        generated = [event[0] for event in request["events"] if not event[5]]
        assert shown == got.chunk_ns[got.chunk_start[at] : got.chunk_start[at + 1]].tolist()
        assert (shown[0] if shown else -1) == got.first_token_ns[at]
        assert (generated[0] if generated else -1) == got.first_output_ns[at]
