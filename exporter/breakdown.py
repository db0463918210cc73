"""The `correlation` object of `summary.json`. Missing numbers are null beside a `missing` that says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from correlator.associate import Association
from correlator.decompose import Breakdown, OtherParts
from loadgen.metrics import QUANTILES

SPREAD = ("std", "min", "max", *QUANTILES)
NEEDS_SPANS = "part of other_ms; telling it apart needs the engine's spans, which are not read yet"
NOT_PER_REQUEST = "all but the mean needs the engine's spans, which are not read yet"
COMPARABLE_RATIO = 0.02


def correlation(
    whole: Breakdown,
    slices: Sequence[Breakdown],
    associations: Iterable[Association | tuple[str, str, str]],
    *,
    ok: int,
) -> dict[str, Any]:
    """Return the `correlation` object: the run's mean TTFT in parts, the same by slice, and associations.

    Sources: `client`, its stamps; `histogram`, the engine's sums over the requests that ended in the window;
    `remainder`, the TTFT less queue and prefill: network, gateway, tokenising, the wait for the running step, output,
    the client itself. `ok` is how many requests succeeded, with a first token or without: `comparable` says whether the
    engine finished as many, within 2 %. An association that could not be computed is (client measure, server measure,
    reason).
    """
    covered = min(1.0, whole.coverage) if whole.missing is None and whole.coverage is not None else 0.0
    return {
        **({"missing": whole.missing} if whole.missing else {}),
        "coverage": {"trace": 0.0, "response": 0.0, "histogram": covered, "none": 1.0 - covered},
        "client_requests": whole.client_requests,
        "server_requests": whole.server_requests,
        "server_over_client": whole.coverage,
        "comparable": whole.missing is None and abs(whole.server_requests - ok) <= COMPARABLE_RATIO * ok,
        "breakdown": _parts(whole),
        "timeslices": [_slice(piece) for piece in slices],
        "association": [_association(found) for found in associations],
    }


def _parts(whole: Breakdown) -> dict[str, Any]:
    return {
        "ttft_ms": {"mean": whole.ttft_ms, "count": whole.client_requests, "source": "client"},
        "network_ms": _absent(NEEDS_SPANS),
        "gateway_ms": _absent(NEEDS_SPANS),
        "queue_ms": _part(whole.queue_ms, whole, "histogram"),
        "prefill_ms": _part(whole.prefill_ms, whole, "histogram"),
        "other_ms": _part(whole.other_ms, whole, "remainder"),
        "other_of_which": _other(whole),
    }


def _part(mean_ms: float | None, whole: Breakdown, source: str) -> dict[str, Any]:
    if mean_ms is None:
        return _absent(whole.missing or "unknown")
    share = mean_ms / whole.ttft_ms if whole.ttft_ms else None
    return {
        "count": whole.server_requests,
        "mean": mean_ms,
        **dict.fromkeys(SPREAD),
        "share_of_ttft": share,
        "source": source,
        "missing": NOT_PER_REQUEST,
    }


def _other(whole: Breakdown) -> dict[str, Any]:
    """Return what `other` consists of, or why that is not told apart."""
    if whole.other is None:
        names = (field.name for field in fields(OtherParts))
        return {**dict.fromkeys(names), "missing": "the engine's own TTFT does not speak of just these requests"}
    return asdict(whole.other)


def _absent(reason: str) -> dict[str, Any]:
    return {"count": 0, "mean": None, **dict.fromkeys(SPREAD), "share_of_ttft": None, "source": None, "missing": reason}


def _slice(piece: Breakdown) -> dict[str, Any]:
    return {
        "start_ns": piece.start_ns,
        "end_ns": piece.end_ns,
        "client_requests": piece.client_requests,
        "server_requests": piece.server_requests,
        "ttft_ms": piece.ttft_ms,
        "queue_ms": piece.queue_ms,
        "prefill_ms": piece.prefill_ms,
        "other_ms": piece.other_ms,
        **({"missing": piece.missing} if piece.missing else {}),
    }


def _association(found: Association | tuple[str, str, str]) -> dict[str, Any]:
    if isinstance(found, tuple):
        client, server, reason = found
        return {"client": client, "server": server, "lag_s": None, "rho": None, "ci95": None, "missing": reason}
    return {
        "client": found.client,
        "server": found.server,
        "lag_s": found.lag_s,
        "rho": found.rho,
        "ci95": list(found.ci95) if found.ci95 else None,
        "rho_lag0": found.rho_lag0,
        "pairs": found.pairs,
    }
