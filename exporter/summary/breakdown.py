"""Where the TTFT and the end-to-end time of a group of requests went, by part: an object of `summary.json`.

Missing numbers are null beside a `missing` that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec import NODEFAULT, Struct, UnsetType
from msgspec.structs import asdict

from sidelight.correlator.breakdown import SOURCES, Parts, gateway_label, network_label
from sidelight.correlator.estimate.table import QUALITIES, Attribution
from sidelight.correlator.exact.clock_offset import ClockOffset
from sidelight.correlator.exact.table import SLACK_S
from sidelight.correlator.parts import (
    DECODE,
    E2E_PARTS,
    ENGINE_FRONTEND,
    GATEWAY_AT_MOST,
    GATEWAY_REQUEST,
    INNER_PARTS,
    NETWORK,
    SEND,
    SHARED_PARTS,
    TTFT_PARTS,
    UNDIVIDED_LABELS,
    Part,
)
from sidelight.correlator.statistics.server_times import ServerMeans
from sidelight.loadgen.requests.metrics import stamped_ms
from sidelight.rundir.columns import Bools, Floats, Texts
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Ratio, doc
from sidelight.rundir.stats import STATISTICS, Statistics, describe

Declared = TypeVar("Declared", bound=Struct)
UNTIMED = "no request with a first token is here"
NOT_QUEUED = "no engine states it, and pages show no load within a queue: it is in first_step_ms, or was short"
IN_PREFILL = "its engine's span is not divided: included in prefill_ms"
NOT_SEEN = "not seen: requests begin at the gateway, whose clients sent no spans"

Source = Annotated[
    Literal["trace", "response", "histogram", "mixed", "client"] | None,
    doc(
        "Where it is from: the engine's spans, its replies, estimates from its histograms, several of these, or the "
        "client's stamps."
    ),
]
Estimated = Annotated[
    Count | UnsetType,
    doc("Of a `mixed` source with estimates: the requests of which it is one; of the others it is exact.", "requests"),
]
ErrorMs = Annotated[Amount | None, doc("Root mean square of the requests' standard errors; 0 is exact.", "ms")]


class Coverage(Struct, frozen=True, kw_only=True):
    """Fractions of the requests with a first token by the source of their breakdown; they sum to 1."""

    trace: Annotated[Ratio, doc("By the engine's spans, joined by trace or request id.", NO_UNIT)]
    response: Annotated[Ratio, doc("By timings in the reply.", NO_UNIT)]
    histogram: Annotated[Ratio, doc("Estimated from the engine's histograms between scrapes.", NO_UNIT)]
    none: Annotated[Ratio, doc("Without a breakdown.", NO_UNIT)]


class Quality(Struct, frozen=True, kw_only=True):
    """Requests with a first token by how certain their parts are."""

    exact: Annotated[
        Count, doc("The engine's own numbers, or alone between two scrapes, as whole numbers prove.", "requests")
    ]
    by_time: Annotated[
        Count,
        doc("The engine's own numbers, joined by time alone: no id is on both sides, and none else fits.", "requests"),
    ]
    tight: Annotated[Count, doc("Estimated, one of two or three that ended between two scrapes.", "requests")]
    shared: Annotated[Count, doc("Estimated, one of more.", "requests")]
    mixed_traffic: Annotated[
        Count, doc("Estimated, where requests of others ended too, or counts are inconsistent.", "requests")
    ]
    prior: Annotated[Count, doc("Expected, never observed.", "requests")]
    none: Annotated[Count, doc("Not known.", "requests")]


class Whole(Statistics, frozen=True, kw_only=True):
    """Total time that is broken down, over the requests with a breakdown; of TTFT over all where none has one."""

    source: Annotated[
        Literal["client", "gateway", "mixed"],
        doc("Who measured it: the client, or of a watch the gateway at which requests begin, or each for some."),
    ] = "client"


class TtftPart(Statistics, frozen=True, kw_only=True):
    """One part of the TTFT over the requests in which it is known; null where there is none, with `missing`."""

    share_of_ttft: Annotated[
        float | None, doc("Sum of the part over the sum of the TTFT of all requests with a breakdown.", NO_UNIT)
    ]
    source: Source
    error_ms: ErrorMs
    estimated: Estimated = UNSET
    mean_ci90: Annotated[
        tuple[float, float] | UnsetType,
        doc(
            "90 % interval of what the mean is over a long time at this load, of `means_only`; absent where too few "
            "scrapes show how it varies.",
            "ms",
        ),
    ] = UNSET


class E2ePart(Statistics, frozen=True, kw_only=True):
    """One part of the end-to-end time over the requests in which it is known; null where there is none."""

    share_of_e2e: Annotated[
        float | None, doc("Sum of the part over the sum of the E2E time of all requests with a breakdown.", NO_UNIT)
    ]
    source: Source
    error_ms: ErrorMs
    estimated: Estimated = UNSET


def json_name(part: Part) -> str:
    """Return the name of a part in the summary."""
    return f"{part.name}_ms"


def with_fields(
    added: Mapping[str, Any], *, after: str, default: Any = NODEFAULT
) -> Callable[[type[Declared]], type[Declared]]:
    """Return a decorator that adds fields, by name, to a Struct behind its field `after`."""

    def extended(declared: type[Declared]) -> type[Declared]:
        fields: list[Any] = []
        for field in msgspec.structs.fields(declared):
            fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
            if field.name == after:
                fields += ((name, kind, default) for name, kind in added.items())
        name, place, namespace = declared.__name__, declared.__module__, {"__doc__": declared.__doc__}
        struct = msgspec.defstruct(name, fields, namespace=namespace, module=place, frozen=True, kw_only=True)
        return cast("type[Declared]", struct)

    return extended


def _defined(parts: Sequence[Part], kind: type[TtftPart | E2ePart]) -> dict[str, Any]:
    return {json_name(part): Annotated[kind, doc(part.definition, "ms")] for part in parts}


@with_fields(_defined(E2E_PARTS, E2ePart), after="e2e_ms")
class E2eBreakdown(Struct, frozen=True, kw_only=True):
    """The parts of the end-to-end time; they sum to it."""

    e2e_ms: Annotated[Whole, doc("What is broken down.", "ms")]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> E2ePart:
            """Return the part of that name."""


@with_fields(_defined((*TTFT_PARTS, *INNER_PARTS, GATEWAY_AT_MOST, SEND), TtftPart), after="ttft_ms")
class Breakdown(Struct, frozen=True, kw_only=True):
    """Where the TTFT went, and the end-to-end time; docs/reference/metrics/breakdown.md defines the parts."""

    ttft_ms: Annotated[Whole, doc("What is broken down.", "ms")]
    network_label: Annotated[
        str,
        doc(
            "What `network_ms` is, in words: `outside the engine` where no gateway's part is known, `network` where "
            "it is of every request, `network and gateway` where spans of a gateway came and say nothing of its part, "
            "else `rest outside the engine`."
        ),
    ]
    gateway_label: Annotated[
        str,
        doc("What `gateway_ms` is, in words: `gateway`, or `gateway, inbound` where only its way in is known."),
    ]
    merged: Annotated[
        dict[str, int], doc("What other_ms includes for want of a source that separates it, by count.", "requests")
    ]
    e2e: Annotated[E2eBreakdown, doc("The same of the end-to-end time.")]
    means_only: Annotated[
        str | UnsetType,
        doc("Why only means over the run are known, from the histograms' sums; absent where requests have breakdowns."),
    ] = UNSET

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> TtftPart:
            """Return the part of that name."""


class Group(Struct, frozen=True, kw_only=True):
    """Some of the requests together."""

    requests: Annotated[Count, doc("Requests with a first token.", "requests")]
    coverage: Annotated[Coverage, doc("Fractions of them by the source of their breakdown.", NO_UNIT)]
    quality: Annotated[Quality, doc("How certain their parts are, by count.", "requests")]
    breakdown: Annotated[Breakdown, doc("Where their TTFT and end-to-end time went.", "ms")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Requests with their reconstructed times: columns [n] in one order, and the engines' clocks by name."""

    parts: Parts
    attribution: Attribution
    clocks: Mapping[str, ClockOffset]


def group(of: Explained, rows: Bools) -> Group:
    """Describe some of the requests."""
    timed = rows & np.isfinite(of.parts.ttft_s)
    return Group(
        requests=int(timed.sum()),
        coverage=coverage(of.parts, timed),
        quality=quality(of.parts, timed),
        breakdown=_breakdown(of, rows),
    )


def coverage(parts: Parts, rows: Bools) -> Coverage:
    """Return the fractions of some requests by source."""
    count = int(rows.sum())
    sources = Counter(parts.source[rows].tolist())
    return Coverage(**{name: sources[name] / count if count else float(name == "none") for name in SOURCES})


def quality(parts: Parts, rows: Bools) -> Quality:
    """Count some requests by how certain their parts are."""
    qualities = Counter(parts.quality[rows].tolist())
    return Quality(**{name: qualities[name] for name in QUALITIES})


def counted(words: Texts) -> dict[str, int]:
    """Count, most frequent first."""
    return dict(sorted(Counter(words.tolist()).items(), key=lambda pair: (-pair[1], pair[0])))


def _breakdown(of: Explained, rows: Bools) -> Breakdown:
    parts = of.parts
    timed, covered = rows & np.isfinite(parts.ttft_s), rows & parts.covered
    ended = rows & (parts.source != "none") & np.isfinite(parts.e2e_s)
    why = "no request has a breakdown of its own" if timed.any() else UNTIMED
    e2e = {json_name(part): E2ePart(**_part(of, part, ended, "e2e", why)) for part in E2E_PARTS}
    ttft: dict[str, Any] = {
        json_name(part): TtftPart(**_part(of, part, covered, "ttft", why))
        for part in (*TTFT_PARTS, *INNER_PARTS, GATEWAY_AT_MOST, SEND)
    }
    whole = covered if covered.any() else ended
    return Breakdown(
        network_label=network_label(parts, whole),
        gateway_label=gateway_label(parts, whole),
        ttft_ms=_whole(parts, parts.ttft_s, covered if covered.any() else timed, why),
        **ttft,
        merged=counted(parts.merged[covered & (parts.merged != "")]),
        e2e=E2eBreakdown(e2e_ms=_whole(parts, parts.e2e_s, ended, why), **e2e),
    )


def _whole(parts: Parts, whole_s: Floats, rows: Bools, why: str) -> Whole:
    """Return the total time that is broken down. For requests that begin at a gateway, it was measured there.

    Of an estimated request nothing shows where it begins: the others say it.
    """
    begun, exact = parts.begins_at_gateway[rows], parts.source[rows] != "histogram"
    source: Literal["client", "gateway", "mixed"] = "client"
    if begun.any():
        source = "gateway" if begun[exact].all() else "mixed"
    return Whole(**asdict(describe(stamped_ms(whole_s[rows]), why)), source=source)


def is_certain(part: TtftPart | E2ePart) -> bool:
    """Return whether a part is known and no smaller than its standard error: else its share is not named."""
    return part.mean is not None and (part.error_ms or 0.0) <= abs(part.mean)


def label_of(part: Part, breakdown: Breakdown) -> str:
    """Return the label of a part of a breakdown, for people."""
    transfer = breakdown.kv_transfer_ms
    if part.name == "decode_queue" and transfer.mean is None and transfer.missing != NOT_QUEUED:
        return "decode queue, KV load"
    undivided = UNDIVIDED_LABELS if breakdown.queue_ms.missing == IN_PREFILL else {}
    labels = {"network": breakdown.network_label, "gateway": breakdown.gateway_label, **undivided}
    return labels.get(part.name, part.label)


def without_queued_loads(breakdown: Breakdown) -> Breakdown:
    """Return a breakdown of requests without a KV load in the decode queue."""
    transfer = msgspec.structs.replace(breakdown.kv_transfer_ms, missing=NOT_QUEUED)
    is_stated = breakdown.kv_transfer_ms.mean is not None
    return breakdown if is_stated else msgspec.structs.replace(breakdown, kv_transfer_ms=transfer)


def short_label_of(part: Part, breakdown: Breakdown) -> str:
    """Return the same for the head of a narrow column."""
    return label_of(part, breakdown).removesuffix(" the engine").removesuffix(", inbound")


def _part(of: Explained, part: Part, rows: Bools, whole: str, why: str) -> dict[str, Any]:
    """Describe one part over the requests that know it; its share is of the whole, TTFT or E2E, of all `rows`."""
    values_ms = 1e3 * of.parts.seconds(part)
    known = rows & np.isfinite(values_ms)
    total_ms = float(stamped_ms(getattr(of.parts, f"{whole}_s")[rows]).sum())
    all_sources = Counter(_sources(of.parts, part)[known].tolist())
    sources = list(all_sources)
    source = ("client" if part.by_client else sources[0] if len(sources) == 1 else "mixed") if sources else None
    return {
        **asdict(describe(values_ms[known], _why_unknown(of, part, rows) if rows.any() else why)),
        f"share_of_{whole}": float(values_ms[known].sum()) / total_ms if sources and total_ms > 0 else None,
        "source": source,
        "error_ms": _error_ms(of, part, known) if sources else None,
        "estimated": all_sources["histogram"] if source == "mixed" and "histogram" in sources else UNSET,
    }


def _sources(parts: Parts, part: Part) -> Texts:
    """Return each request's source of a part; what a gateway took before its call, its own spans state."""
    if part.name == GATEWAY_REQUEST.name:
        return np.full(len(parts), "trace", dtype=np.object_)
    if part.name == DECODE.name:
        return parts.decode_source
    if part.name == "gateway":
        return np.where(np.isfinite(parts.gateway_at_most_s), "trace", parts.source).astype(np.object_)
    return parts.source


def _error_ms(of: Explained, part: Part, rows: Bools) -> float | None:
    """Return the root mean square of the requests' standard errors, None if unknown."""
    if part.error == "unstated":
        return None
    if part.error in ("clocks", "hand_over"):
        errors_s = of.parts.network_split_error_s if part.error == "clocks" else of.parts.router_error_s
        return float(np.sqrt(((1e3 * errors_s[rows]) ** 2).mean()))
    if not part.error:
        return 0.0
    estimated = rows & (_sources(of.parts, part) == "histogram")
    errors_ms = 1e3 * getattr(of.attribution, f"{part.error}_sd_s")[estimated]
    return float(np.sqrt((errors_ms**2).sum() / rows.sum()))


def _why_unknown(of: Explained, part: Part, rows: Bools) -> str:
    """Return the reason for a part missing in all requests that have a breakdown."""
    if part.name == NETWORK and of.parts.begins_at_gateway[rows].any():
        return NOT_SEEN
    if part.name in ("gateway", "gateway_request"):
        return "no span of a gateway says it: included in network_ms"
    if part.name == GATEWAY_AT_MOST.name:
        return "no span of a gateway came, or they say their first output"
    if of.parts.undivided[rows].all() and (part.name == "queue" or part in SHARED_PARTS):
        return IN_PREFILL if part.name == "queue" else "its engine's span is not divided: included in first_step_ms"
    if part in SHARED_PARTS:
        if not of.parts.by_two_engines[rows].any():
            return "one engine served each request"
        return "no larger than the two clocks' error: in network_ms" if part.error else "no engine states it"
    if part.stated:
        return f"no source separates it: included in {json_name(ENGINE_FRONTEND)}"
    if part.error == "unstated":
        return "no round trip was measured"
    if part.error == "clocks":
        reasons = dict.fromkeys(clock.reason for clock in of.clocks.values() if clock.reason)
        return ": ".join(("in network_ms", *(["; ".join(reasons)] if reasons else [])))
    return "no source separates it: included in other_ms"


def why_impossible(means: ServerMeans) -> str | None:
    """Return the reason if the histograms' means cannot be parts of the TTFT, else None."""
    known_s = (means.queue_s, means.prefill_s, means.outside_s, means.decode_queue_s, means.first_step_s)
    parts_s = [mean_s or 0.0 for mean_s in known_s]
    whole_s = means.ttft_s or 0.0
    if min(parts_s) >= -SLACK_S and sum(parts_s) <= whole_s + SLACK_S:
        return None
    queue_ms, prefill_ms, *_ = (f"{1e3 * part_s:,.1f}" for part_s in parts_s)
    return (
        f"the engine's page states a mean of {queue_ms} ms in its queue and of {prefill_ms} ms in prefill, which "
        f"cannot be parts of a mean TTFT of {1e3 * whole_s:,.1f} ms: its times are of other requests, or not in seconds"
    )


def means_of(means: ServerMeans, why: str) -> dict[str, TtftPart]:
    """Return the mean parts given by the histograms' sums, in place of single requests' parts."""
    ttft_ms, queue_ms, prefill_ms = (1e3 * (mean_s or 0.0) for mean_s in (means.ttft_s, means.queue_s, means.prefill_s))
    means_ms = {"queue_ms": queue_ms, "prefill_ms": prefill_ms}
    others_s = {
        "network_ms": means.outside_s, "decode_queue_ms": means.decode_queue_s, "first_step_ms": means.first_step_s,
    }  # fmt: skip
    means_ms |= {name: 1e3 * mean_s for name, mean_s in others_s.items() if mean_s is not None}
    means_ms["other_ms"] = ttft_ms - sum(means_ms.values())
    ci90_ms = {f"{name}_ms": (1e3 * low_s, 1e3 * high_s) for name, (low_s, high_s) in means.ci90_s.items()}
    return {
        name: TtftPart(
            count=means.server_requests,
            **cast("dict[str, Any]", dict.fromkeys(STATISTICS) | {"mean": mean_ms}),
            share_of_ttft=mean_ms / ttft_ms if ttft_ms else None,
            source="histogram",
            error_ms=0.0 if means.proof else None,
            missing=f"only the mean is known: {why}",
            mean_ci90=ci90_ms.get(name, UNSET),
        )
        for name, mean_ms in means_ms.items()
    }
