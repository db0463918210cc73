"""Replies and requests whose texts are left out of the logs."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sidelight.loadgen import records
from sidelight.loadgen.protocols.reading.reply import logged, read_to_log, unpack
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, RequestPart
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.transports.packing import pack

GOLDEN = Path(__file__).parents[1] / "golden"
HEAD = b"HTTP/1.1 422 Unprocessable\r\nContent-Type: application/json\r\n\r\n"
FORM = PROTOCOLS["chat"].form


def redacted(part: RequestPart) -> RequestPart:
    """Return a whole reply as a worker logs it with --redact-bodies."""
    reads = unpack(part)
    stamps_ns, ends = (array("q", column.tolist()) for column in (reads.stamps_ns, reads.ends))
    reply = read_to_log(FORM, part.status, part.head, reads.body, stamps_ns, ends)
    packed = pack(stamps_ns, ends, b"")
    return msgspec.structs.replace(
        part, reads_ns=packed.reads_ns, read_ends=packed.read_ends, body=packed.body, packing=packed.packing,
        sha256="0" * 64, reply=reply,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["sglang_trtllm", "two_engines", "vllm_spans"])
def test_all_columns_of_a_redacted_run_are_as_without(name: str):
    """Tokens, times, errors and the servers' own timings of recorded replies."""
    raw = GOLDEN / name / "raw"
    plan = [planned for path in sorted(raw.glob("plan-*.log")) for planned in records.read_plan(path)]
    read = [record for path in sorted(raw.glob("requests-*.log")) for record in records.read_log(path)]
    whole = [record for record in read if isinstance(record, RequestPart) and record.last and record.seq == 0]
    assert len(whole) > 5
    tables = [assemble(plan, parts, run_id="run") for parts in (whole, map(redacted, whole))]
    for column in fields(tables[0]):
        expected, got = (getattr(table, column.name) for table in tables)
        assert expected.dtype == got.dtype
        np.testing.assert_array_equal(expected, got, column.name)


@pytest.mark.parametrize(
    "body",
    [
        b'{"detail":[{"type":"missing","msg":"Field required","input":{"prompt":"hush"}}]}',
        b'{"error":{"code":"missing","request":{"messages":[{"role":"user","content":"hush"}]}}}',
        b"{\"error\":\"field missing in {'prompt': 'hush'}\"}",
        b"{\"object\":\"error\",\"message\":\"[{'type': 'missing', 'input': {'prompt': 'hush'}}]\"}",
    ],
)
def test_an_error_that_repeats_the_request_is_kept_without(body: bytes):
    reply = logged(read_to_log(FORM, 422, HEAD, body, array("q", [1]), array("q", [len(body)])), np.array([1]))
    assert "missing" in reply.error
    assert "hush" not in reply.error


def test_a_reply_with_other_stamps_than_its_reads_is_refused():
    """Bytes that hold none are refused, too."""
    body = b'data: {"choices":[{"delta":{"content":"hush"}}]}\n\n'
    head = HEAD.replace(b"422 Unprocessable", b"200 OK").replace(b"application/json", b"text/event-stream")
    written = read_to_log(FORM, 200, head, body, array("q", [7]), array("q", [len(body)]))
    assert [7] == logged(written, np.array([7])).chunk_ns.tolist()
    for packed, stamps in ((written, [8]), (written[:-3], [7]), (b"hush", [7])):
        with pytest.raises(ValueError, match=r"reply|unpacked"):
            logged(packed, np.array(stamps))


def test_a_planned_request_keeps_its_length_and_its_hash():
    """Those of its later turns too."""
    turn = PlannedRequest(index=2, body=b"hush again")
    planned = records.hidden_request(PlannedRequest(index=1, body=b"hush", turns=(turn,), input_tokens=3))
    assert (1, 3) == (planned.index, planned.input_tokens)
    for hidden, body in ((planned, b"hush"), (planned.turns[0], b"hush again")):
        assert {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)} == json.loads(hidden.body)
