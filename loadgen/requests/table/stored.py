"""Finished requests that have left memory: Parquet files of many rows, whose columns are loaded when they are read.

A stamp is kept as its distance from the submission, that of a chunk as its distance from the chunk before it.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sidelight.loadgen.records import request_id, trace_id
from sidelight.loadgen.requests.table.log import DTYPES, STAMPS, RequestLog
from sidelight.rundir.columns import Ints, bounds, on_demand, places, starts_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_CACHE_BYTES = 1 << 27
_TYPES = {column.name: str(column.type) for column in fields(RequestLog)}
# Derived from the run's id and the index, so not stored.
_IDS: dict[str, Callable[[str, int], str]] = {"request_id": request_id, "trace_id": trace_id}
_STARTS = starts_of(RequestLog)  # by ragged column
_STAMPS = frozenset(STAMPS) - {"submit_ns"}
_ENCODINGS = {
    f"{name}.list.element" if name in _STARTS else name: "DELTA_BINARY_PACKED"
    for name, kind in _TYPES.items()
    if kind == "Ints"
}


class StoredRequests:
    """Files of finished requests of one run. It owns them; they have no names, and go with it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._files: list[pq.ParquetFile] = []

    def __bool__(self) -> bool:
        return bool(self._files)

    def append(self, log: RequestLog) -> None:
        """Write a file of requests. Raises OSError as on a full disk."""
        import pyarrow as pa  # noqa: PLC0415  which runs of few requests need not wait for
        import pyarrow.parquet as pq  # noqa: PLC0415

        with tempfile.NamedTemporaryFile(prefix="sidelight-", suffix=".parquet") as file:
            pq.write_table(
                _packed(log), file, compression="zstd", use_dictionary=False, column_encoding=_ENCODINGS,
                write_statistics=False,
            )  # fmt: skip
            file.flush()
            self._files.append(pq.ParquetFile(pa.OSFile(file.name, "rb")))

    def table(self, rest: RequestLog) -> RequestLog:
        """Return these requests and the `rest`, by ascending index.

        Columns are loaded when they are read. Those that were read lately are held, up to 128 MB of them.
        """
        order = np.argsort(np.concatenate([*self._parts("index", rest)]), kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        held: OrderedDict[str, Any] = OrderedDict()

        def load(name: str) -> Any:
            if (column := held.pop(name, None)) is None:
                column = self._merged(name, rest, ranks)
                while held and column.nbytes + sum(each.nbytes for each in held.values()) > _CACHE_BYTES:
                    held.popitem(last=False)
            if column.nbytes <= _CACHE_BYTES:
                held[name] = column
            return column

        return on_demand(RequestLog, load)

    def _merged(self, name: str, rest: RequestLog, ranks: Ints) -> Any:
        """Return a column of all requests. Row i, of files first, goes to row ranks[i]."""
        if name in _STARTS.values():
            counts = np.empty(len(ranks), np.int64)
            counts[ranks] = np.concatenate([np.diff(part) for part in self._parts(name, rest)])
            return bounds(counts)
        starts = self._merged(_STARTS[name], rest, ranks) if name in _STARTS else None
        size, done = len(ranks) if starts is None else starts[-1], 0
        merged = np.empty(size, DTYPES[_TYPES[name]])
        for part, rows in zip(self._parts(name, rest), self._rows(rest), strict=True):
            to = ranks[done : done + rows]
            merged[to if starts is None else places(starts, to)] = part
            done += rows
        return merged

    def _rows(self, rest: RequestLog) -> Iterator[int]:
        yield from (file.metadata.num_rows for file in self._files)
        yield len(rest)

    def _parts(self, name: str, rest: RequestLog) -> Iterator[Any]:
        yield from (_part(file, name, self._run_id) for file in self._files)
        yield getattr(rest, name)


def _packed(log: RequestLog) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415

    return pa.table({name: _stored(log, name) for name in _TYPES if name not in _IDS})


def _stored(log: RequestLog, name: str) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    values = getattr(log, name)
    if name in _STARTS:
        starts = getattr(log, _STARTS[name])
        if name == "chunk_ns":
            values = _steps(values, starts, log.submit_ns)
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values))
    if name in _STAMPS:
        return pa.array(values - log.submit_ns, mask=values == -1)
    return pa.array(np.diff(values) if name in _STARTS.values() else values)


def _part(file: pq.ParquetFile, name: str, run_id: str) -> Any:
    """Return a column of one file; of a column of starts one more than its rows."""
    if name in _IDS:
        index = _part(file, "index", run_id).tolist()
        return np.fromiter((_IDS[name](run_id, each) for each in index), np.object_, len(index))
    column: Any = file.read(columns=[name]).column(0).combine_chunks()
    if name == "chunk_ns":
        return _stamps(column.values.to_numpy(), column.offsets.to_numpy(), _part(file, "submit_ns", run_id))
    if name in _STARTS:
        return column.values.to_numpy()
    if name in _STAMPS:
        since_ns = column.fill_null(0).to_numpy() + _part(file, "submit_ns", run_id)
        return np.where(column.is_null().to_numpy(zero_copy_only=False), -1, since_ns)
    if _TYPES[name] == "Texts":
        texts = column.dictionary_encode()
        return np.array(texts.dictionary.to_pylist(), np.object_)[texts.indices.to_numpy()]
    values = column.to_numpy(zero_copy_only=False)
    return bounds(values) if name in _STARTS.values() else values


def _steps(chunk_ns: Ints, starts: Ints, submit_ns: Ints) -> Ints:
    """Return the time of each chunk since the one before it or the submission."""
    firsts, submitted_ns = _firsts(starts, submit_ns)
    steps = np.diff(chunk_ns, prepend=0)
    steps[firsts] = chunk_ns[firsts] - submitted_ns
    return steps


def _stamps(steps: Ints, starts: Ints, submit_ns: Ints) -> Ints:
    """Return the stamps of chunks from their steps."""
    firsts, submitted_ns = _firsts(starts, submit_ns)
    sums = np.cumsum(steps)
    chunk_ns: Ints = sums + np.repeat(submitted_ns - (sums[firsts] - steps[firsts]), np.diff([*firsts, len(steps)]))
    return chunk_ns


def _firsts(starts: Ints, submit_ns: Ints) -> tuple[Ints, Ints]:
    """Return the places of first chunks, and when their requests were submitted."""
    has_chunks = np.diff(starts) > 0
    return starts[:-1][has_chunks], submit_ns[has_chunks]
