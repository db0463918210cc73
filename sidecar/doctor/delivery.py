"""Delivery of a reply: as it was generated, or with pieces held back on its way."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sidelight.rundir.columns import Ints
from sidelight.sidecar.doctor.lines import ASK_ENGINE, HINT, OK, SKIP, WARN, Line

LEAST_PIECES = 8  # fewer do not tell
LEAST_TOGETHER = 3  # in one packet: two may be one that was late
LEAST_HELD_S = 0.05  # less may be this machine's own delay
CURE = (
    "switch the buffering of replies off for this route: nginx `proxy_buffering off`, HAProxy `option http-no-delay`; "
    "middleware that compresses or rewrites replies buffers too"
)


def plain_lines(chunk_ns: Ints, submit_ns: int) -> Iterator[Line]:
    """Yield a warning if a reply's pieces came together, though they took a while. The request was sent at
    `submit_ns`.
    """
    if len(chunk_ns) and float(chunk_ns[0] - submit_ns) / 1e9 >= LEAST_HELD_S and _packets(chunk_ns) == [len(chunk_ns)]:
        lines = delivery_lines(chunk_ns, direct_ns=None, generated_s=math.nan, unknown=CURE)
        yield from (line for line in lines if line[0] != SKIP)


def delivery_lines(
    chunk_ns: Ints, *, direct_ns: Ints | None, generated_s: float, cure: str = CURE, unknown: str = ASK_ENGINE
) -> Iterator[Line]:
    """Yield lines on the delivery of a reply's pieces.

    chunk_ns     when each piece came; those of one packet have one stamp
    direct_ns    the same of a reply that the engine sent without the gateway, None without one
    generated_s  from the first to the last token by the engine's own span, NaN where that is unknown
    cure         what to set where the first ones are held back
    unknown      what to do where it is not known who holds them back
    """
    count, packets = len(chunk_ns), _packets(chunk_ns)
    if count < LEAST_PIECES:
        yield SKIP, f"the reply came in {count} pieces: too few to tell whether any were held back"
        return
    first, later = packets[0], count - packets[0]
    spread_s = float(chunk_ns[-1] - chunk_ns[0]) / 1e9
    together = f"{f'the first {first} of' if later else 'all'} {count} pieces of the reply came in one packet"
    if direct_ns is not None and len(direct_ns):
        if math.isnan(generated_s):
            generated_s = float(direct_ns[-1] - direct_ns[0]) / 1e9
        if _packets(direct_ns)[0] >= first >= LEAST_TOGETHER:
            yield OK, f"{together}, as they do without the gateway"
            return
    if not later and math.isnan(generated_s):
        yield WARN, f"{together}: a gateway or proxy holds replies back, or the engine sends them whole"
        yield HINT, unknown
        return
    gap_s = spread_s / later if math.isnan(generated_s) else generated_s / (count - 1)
    held_s = gap_s * (first - 1)
    if first >= LEAST_TOGETHER and held_s >= LEAST_HELD_S:
        yield WARN, f"{together}: the first token was held back for about {1e3 * held_s:.0f} ms, which counts in TTFT"
        yield HINT, cure
    elif not later:
        yield SKIP, f"the engine generated all {count} pieces within {1e3 * generated_s:.0f} ms: too fast to tell"
    else:
        yield OK, f"the reply came in {count} pieces over {1e3 * spread_s:.0f} ms: nothing holds its beginning back"


def _packets(chunk_ns: Ints) -> list[int]:
    """Return the number of pieces in each packet."""
    counts: list[int] = np.unique(chunk_ns, return_counts=True)[1].tolist()
    return counts
