"""Recorded traffic as a trace: moments and lengths of requests, without any text or name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from sidelight.correlator.opening import open_run
from sidelight.recorded.errors import ConfigurationError, unusable_place
from sidelight.rundir.files import replace_file
from sidelight.rundir.printable.numbers import count_of


def write_trace(path: Path, out: Path) -> str:
    """Write requests as JSON lines that `--trace` reads, and return their number in words.

    A request without token counts cannot be sent again: it is left out, and counted. Raises ConfigurationError where
    no request has them, and where the file cannot be written.
    """
    log = open_run(path).requests
    at_ns = np.where(log.submit_ns >= 0, log.submit_ns, log.dispatch_ns)
    measured = (log.phase == "measure") & (at_ns >= 0)
    known = measured & (log.input_tokens > 0) & (log.output_tokens > 0)
    if not known.any():
        raise ConfigurationError(
            "capture.empty", f"{path}: of {int(measured.sum())} requests none has its tokens counted; a trace needs "
            "usage in replies, or gen_ai.usage.* in clients' spans"
        )  # fmt: skip
    rows = np.flatnonzero(known)[np.argsort(at_ns[known], kind="stable")]
    first_ns = int(at_ns[rows[0]])
    lines = [
        {
            "timestamp": (int(at_ns[row]) - first_ns) / 1e6,
            "input_length": int(log.input_tokens[row]),
            "output_length": int(log.output_tokens[row]),
        }
        for row in rows
    ]
    encode = msgspec.json.Encoder().encode
    try:
        replace_file(out, lambda file: file.writelines(encode(line) + b"\n" for line in lines))
    except OSError as error:
        raise unusable_place("--out", out, error) from error
    lasted_s = (int(at_ns[rows[-1]]) - first_ns) / 1e9
    left_out = int(measured.sum()) - len(rows)
    others = f"; {count_of(left_out, 'request')} without token counts left out" if left_out else ""
    return f"{count_of(len(rows), 'request')} of {lasted_s:.0f} s{others}"
