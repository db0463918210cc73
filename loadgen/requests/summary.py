"""The "client" object of summary.json, from a `RequestLog`; all pure.

The metrics of a request are defined in `request_metrics`, what a chunk gap may be called in `chunks`, objectives in
`slo`; what is told by class, by length and in the peers' terms stands in `client_details`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import to_builtins

from loadgen.requests.delivery import itl_option, single_token_ratio
from loadgen.requests.metrics import RequestMetrics, counts, request_metrics
from loadgen.requests.slo import Slo, goodput
from loadgen.requests.table import STATUSES, RequestLog
from rundir.columns import take
from rundir.stats import QUANTILES, Missing, describe, finite

__all__ = ["QUANTILES", "client_summary", "describe", "request_metrics", "window_of"]


def client_summary(
    log: RequestLog, *, start_ns: int | None = None, end_ns: int | None = None, slo: Slo | None = None
) -> dict[str, Any]:
    """The "client" object of summary.json, for the requests of `log`; strict JSON.

    Statistics are over requests with status ok. Throughput counts the ok requests that ended within the window, over
    its length; the window is from the first submission to the last response where it is not given.
    """
    ok = take(log, log.status == "ok")
    metrics = request_metrics(ok)
    itl_name = "itl_ms" if itl_option(ok) == "direct" else "time_between_chunks_ms"
    start_ns, end_ns = window_of(log, start_ns, end_ns)
    why = "no successful reply told it" if len(ok) else "no request succeeded"
    blocks = {
        "ttft_ms": metrics.ttft_ms,
        "tpot_ms": metrics.tpot_ms,
        itl_name: metrics.itl_ms,
        "e2e_ms": metrics.e2e_ms,
        "request_output_tps": metrics.request_output_tps,
        "input_tokens": counts(ok.input_tokens),
        "output_tokens": counts(ok.output_tokens),
    }
    return {
        "window": {"start_ns": start_ns, "end_ns": end_ns},
        "requests": {"sent": len(log), **{name: int((log.status == name).sum()) for name in STATUSES}},
        "errors": _errors_by_kind(log),
        **{name: to_builtins(describe(values, why)) for name, values in blocks.items()},
        "chunks": {
            "single_token_ratio": finite(single_token_ratio(ok)),
            # Non-content events before the first token, which the draft wants noted.
            "role_only_first": int(ok.role_only_first.sum()),
            "blank_before_first": int((ok.blank_before_first > 0).sum()),
        },
        "throughput": _throughput(ok, metrics, start_ns, end_ns, slo),
    }


def window_of(log: RequestLog, start_ns: int | None, end_ns: int | None) -> tuple[int | None, int | None]:
    """What throughput is counted over: as given, else from the first submission to the last response."""
    starts, ends = log.submit_ns[log.submit_ns >= 0], log.end_ns[log.end_ns >= 0]
    if start_ns is None and len(starts):
        start_ns = int(starts.min())
    if end_ns is None and len(ends):
        end_ns = int(ends.max())
    return start_ns, end_ns


def _throughput(
    ok: RequestLog, metrics: RequestMetrics, start_ns: int | None, end_ns: int | None, slo: Slo | None
) -> dict[str, Any]:
    """Rates over a window, of the requests that ended ok within it; what cannot be told is null, with a reason."""
    names = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput_requests_per_s")
    result: dict[str, Any] = dict.fromkeys(names)
    if start_ns is None or end_ns is None or end_ns <= start_ns:
        reason = "nothing was sent and answered within the window"
        return {"duration_s": None, **result, "missing": dict.fromkeys(names, reason)}
    duration_s = (end_ns - start_ns) / 1e9
    within = (ok.end_ns >= start_ns) & (ok.end_ns <= end_ns)
    amounts = (_sum(ok.output_tokens[within]), _sum(ok.input_tokens[within]), int(within.sum()))
    missing: dict[str, str] = {}
    for name, amount in zip(names, (*amounts, _good(ok, metrics, within, slo)), strict=True):
        if isinstance(amount, Missing):
            missing[name] = amount.reason
        else:
            result[name] = amount / duration_s
    return {"duration_s": duration_s, **result, **({"missing": missing} if missing else {})}


def _sum(tokens: npt.NDArray[np.int64]) -> int | Missing:
    silent = int((tokens < 0).sum())
    return Missing(reason=f"{silent} of {len(tokens)} replies told no usage") if silent else int(tokens.sum())


def _good(ok: RequestLog, metrics: RequestMetrics, within: npt.NDArray[np.bool_], slo: Slo | None) -> int | Missing:
    """How many requests within the window met the objectives."""
    if slo is None:
        return Missing(reason="no service level objective was given")
    good = goodput(slo, ok, metrics)
    if within.any() and good.unknown[within].all():
        return Missing(reason=f"no reply told what {slo.text} bounds")
    return int((within & good.met).sum())


def _errors_by_kind(log: RequestLog) -> dict[str, int]:
    """Requests that did not succeed, by the kind of error; most frequent first."""
    texts = log.error[(log.status != "ok") & (log.error != "")]
    kinds, counts = np.unique([str(text).partition(":")[0] for text in texts], return_counts=True)
    ranked = sorted(zip(kinds.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return dict(ranked)
