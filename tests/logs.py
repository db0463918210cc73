"""Request logs written down as rows: what a row leaves out is missing, and its status ok. Times in milliseconds."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from sidelight.loadgen.requests.table.log import RequestLog

MS = 1_000_000
# Short names of a row, and the columns they fill.
STAMPS = {
    "scheduled": ("scheduled_ns",),
    "dispatch": ("dispatch_ns",),
    "connected": ("connected_ns",),
    "submit": ("submit_ns",),
    "first": ("first_output_ns", "first_token_ns"),
    "last": ("last_output_ns", "last_token_ns"),
    "end": ("end_ns",),
}
NAMES = {
    "class": "workload_class",
    "declared": "declared_input_tokens",
    "input": "input_tokens",
    "output": "output_tokens",
    "blank": "blank_before_first",
}
DEFAULTS = {
    "status": "ok",
    "output_tokens_source": "usage",
    "http_status": 200,
    "worker": 0,
    "turn": 0,
    "held_ns": 0,
    "blank_before_first": 0,
    "received_bytes": 0,
}


def request_log(*rows: dict[str, object]) -> RequestLog:
    """A log with the given rows: `chunks` are stamps of content, `chars` the characters in each."""
    columns: dict[str, object] = {}
    for column in fields(RequestLog):
        kind, empty = {
            "Ints": (np.int64, -1),
            "Texts": (np.object_, ""),
            "Floats": (np.float64, np.nan),
        }.get(str(column.type), (np.bool_, False))
        columns[column.name] = np.full(len(rows), DEFAULTS.get(column.name, empty), kind)
    columns["index"] = np.arange(len(rows))
    for at, row in enumerate(rows):
        for name, value in row.items():
            if name in STAMPS:
                for stamp in STAMPS[name]:
                    columns[stamp][at] = round(value * MS) if value >= 0 else -1
            elif name not in ("chunks", "chars", "chunk_choice"):
                columns[NAMES.get(name, name)][at] = value
    chunks = [row.get("chunks", ()) for row in rows]
    chars = [row.get("chars", (4,) * len(entries)) for row, entries in zip(rows, chunks, strict=True)]
    columns["chunk_ns"] = np.array([at * MS for entries in chunks for at in entries], np.int64)
    columns["chunk_chars"] = np.array([count for entries in chars for count in entries], np.int64)
    columns["chunk_start"] = np.cumsum([0, *map(len, chunks)]).astype(np.int64)
    columns["choice_start"] = np.cumsum([0, *(len(row.get("chunk_choice", ())) for row in rows)]).astype(np.int64)
    columns["chunk_choice"] = np.array([choice for row in rows for choice in row.get("chunk_choice", ())], np.int64)
    return RequestLog(**columns)
