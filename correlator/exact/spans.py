"""Exact times from the engines' spans: of the request's trace, or with the request's id.

Which forms an engine gives its ids is in `scraper/engines/*.yaml`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from sidelight.correlator.exact.table import ALL_TIMES, SLACK_S, UNDIVIDED, ExactTimes, Refusal
from sidelight.correlator.parts import SHARED_PARTS
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Texts
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.engines.catalogue import INNER_TIMES
from sidelight.scraper.spans.requests import EngineSpans

# Envoy writes whether a trace was sampled into the thirteenth digit of a UUID that it passes on as X-Request-Id.
_UUID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-)[0-9a-f]([0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12})")
_ANY_TRACE = r"\g<1>4\2"


def by_trace(
    requests: RequestLog, spans: EngineSpans, taken: set[int], rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times of requests by the spans in their traces; `taken` are the spans that joined some request."""
    if not (places := _places(spans.trace_id, taken)):
        return
    bearers = Counter(requests.trace_id)
    owners = Owners(requests)
    for row in rows:
        trace = requests.trace_id[row]
        if trace not in places:
            continue
        if bearers[trace] > 1:
            why[row].append(Refusal(f"{bearers[trace]} requests share its trace id"))
        else:
            yield from _of_spans(row, spans, places[trace], taken, why, owners)


def by_request_id(
    requests: RequestLog, spans: EngineSpans, taken: set[int], rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Yield requests' times from the spans that bear their id in the engine's form.

    UUIDs that differ in the thirteenth digit alone are the same: a gateway changes it.
    """
    claims: dict[int, Sequence[int]] = {}
    for engine in sorted(set(spans.engine)):
        others = np.flatnonzero(spans.engine != engine).tolist()
        places = _places(np.array([same_id(text) for text in spans.request_id], dtype=np.object_), {*taken, *others})
        for row in rows:
            bearing = bearing_id(engine, requests.request_id[row], requests.response_id[row], places)
            if bearing:
                claims[row] = bearing
    claimed = Counter(place for bearing in claims.values() for place in bearing)
    owners = Owners(requests)
    for row, bearing in claims.items():
        most = max(claimed[place] for place in bearing)
        if most > 1:
            why[row].append(Refusal(f"{most} requests share its request id"))
        else:
            yield from _of_spans(row, spans, bearing, taken, why, owners)


def bearing_id(engine: str, request_id: str, response_id: str, places: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the places of spans that bear a request's ids.

    They are by the first of an engine's id forms that any span has. `places` are by the ids of the engine's spans, each
    through `same_id`.
    """
    forms = (_of_form(form, request_id, response_id, places) for form in _forms(engine))
    return next((bearing for bearing in forms if bearing), ())


def same_id(text: str) -> str:
    """Return an id without the digits that gateways change."""
    return _UUID.sub(_ANY_TRACE, text)


class Owners:
    """Requests of a log by their ids, to find the owner of a span."""

    def __init__(self, requests: RequestLog) -> None:
        self.requests = requests

    @cached_property
    def _rows(self) -> dict[str, set[int]]:
        rows: dict[str, set[int]] = {}
        for column in (self.requests.request_id, self.requests.response_id):
            for row, text in enumerate(column.tolist()):
                rows.setdefault(same_id(text), set()).add(row)
        return rows

    def bears_id(self, row: int, engine: str, text: str) -> bool | None:
        """Return whether an engine's id is a form of this request's id. None where it is of no request here."""
        ids = self.requests.request_id[row], self.requests.response_id[row]
        if any(_of_form(form, *ids, {same_id(text): (0,)}) for form in _forms(engine)):
            return True
        named = [match["id"] for pattern in _patterns(engine) if (match := pattern.fullmatch(same_id(text)))]
        owners = set().union(*(self._rows.get(name, ()) for name in named if name))
        return row in owners if owners else None


def own_spans(owners: Owners, row: int, spans: EngineSpans, places: Sequence[int]) -> Sequence[int] | Refusal:
    """Return a request's spans among those in its trace or with its id.

    A refusal says why none is known to be its own, or that not all of them can be read.

    - choices begin together and generate what the client counted; prompts have numbers, steps of a beam search too
    - else those with the request's id, with its tokens, or alone at the time of its first output
    - one that bears the id of another request is not this one's
    - of engines that shared it there are two, and the spans of both
    """
    bearing = {place: owners.bears_id(row, spans.engine[place], spans.request_id[place]) for place in places}
    requests, left = owners.requests, _stating(spans, places)
    if len(places) > 1 and not _are_one(requests, row, spans, left, strictly=True):
        left = _stating(spans, [place for place in places if bearing[place]] or places)
    for narrowed in (_with_its_tokens, _at_its_first_output):
        if len(left) > 1 and not _are_one(requests, row, spans, left):
            left = narrowed(requests, row, spans, left) or left
    if len(left) > 1 and not _are_one(requests, row, spans, left):
        return Refusal(f"{len(left)} spans of engines could be its own")
    if any(bearing[place] is False for place in left):
        return Refusal("its span bears the id of another request")
    gap = _gap(requests, row, spans, left, [place for place in places if bearing[place] is not False])
    return Refusal(gap) if gap else left


def _gap(requests: RequestLog, row: int, spans: EngineSpans, places: Sequence[int], beside: Sequence[int]) -> str:
    """Return the reason against the exact times of some spans, "" for none."""
    counted = _counted(requests, row)
    if len(places) > 2 and _are_halves(spans, places, counted) and not _are_alike(requests, row, spans, places):
        return f"{len(places)} engines served it one after the other"
    processes = set(spans.clock[list(places)])
    unread = (spans.fault[place] for place in beside if spans.fault[place] and spans.clock[place] not in processes)
    if places and (fault := next(unread, "")):
        return f"its span of another engine {fault}: refused"
    if (
        len(places) == 1
        and spans.role[places[0]] == "prefill"
        and (counted > 1 or _is_undivided(spans.engine[places[0]]))
    ):
        return "no span of the engine that decoded it came"
    return ""


def span_times(spans: EngineSpans, places: Sequence[int], beside: Sequence[int] = ()) -> ExactTimes | None:
    """Return the times of the span with the earliest first token.

    `beside` are all spans in the request's trace or with its id. Where two engines shared it, the times are of both.

    Of the others only the longest decode is used. None where no span states queue or prefill. A span without a TTFT,
    where others of its process state theirs, had no token: for several choices SGLang first fills its prefix cache, by
    requests with spans of their own, whose waits and prefills come before the choice's. After the first step of a beam
    search, all is decode.
    """
    stating = _stating(spans, places)
    if not stating:
        return None
    if _are_of_two(spans, stating):
        return _of_two(spans, *_in_order(spans, stating))
    if sorted(spans.role[stating]) == ["decode", "prefill"]:
        return _of_two_at_once(spans, *_in_order(spans, stating))
    with_token = {spans.clock[place] for place in stating if np.isfinite(spans.ttft_s[place])}
    choices = [place for place in stating if np.isfinite(spans.ttft_s[place]) or spans.clock[place] not in with_token]
    first = min(choices, key=lambda place: _first_token_ns(spans, place))
    times_s: dict[str, Any] = {f"{name}_s": float(getattr(spans, f"{name}_s")[first]) for name in ALL_TIMES}
    first_ns = _first_token_ns(spans, first)
    fills = [place for place in _stating(spans, beside) if _filled_cache(spans, place, first)]
    for part in SHARED_PARTS:  # an engine that serves alone has a stage called decode_waiting, too
        times_s[f"{part.name}_s"] = np.nan
    for name in ("queue", "prefill", *INNER_TIMES):
        times_s[f"{name}_s"] += float(np.nansum(getattr(spans, f"{name}_s")[fills]))
    # Engines that shared a request may have clocks of their own.
    alike = [place for place in stating if spans.clock[place] == spans.clock[first]]
    end_ns = int(spans.end_ns[alike].max())
    if len(places) > 1 and _are_steps(spans, places):
        times_s["decode_s"] = (end_ns - first_ns) / 1e9
        times_s["e2e_s"] = (end_ns - int(spans.arrival_ns[first])) / 1e9
    else:
        times_s["decode_s"] = float(np.fmax.reduce(spans.decode_s[stating]))
    return ExactTimes(
        inner_s={name: times_s.pop(f"{name}_s") for name in INNER_TIMES},
        **times_s,
        arrival_ns=int(spans.arrival_ns[first]),
        end_ns=end_ns,
        span_id=spans.span_id[first],
        trace_id=spans.trace_id[first],
        clock=spans.clock[first],
        place=first if len(stating) == 1 and not fills else -1,
    )


def _are_of_two(spans: EngineSpans, places: Sequence[int]) -> bool:
    """Return whether spans are of two engines, one after the other.

    By stamps only where nothing else tells: choices of one token are alike, but of one process.
    """
    roles, processes = set(spans.role[places]), set(spans.clock[places])
    if len(places) != 2 or "prefill" not in roles or "decode" in roles or not _are_halves(spans, places, -1):
        return False
    is_known = len(processes) == 2 or (processes == {""} and "" in roles)
    return is_known or _is_later(spans, *_in_order(spans, places))


def _is_later(spans: EngineSpans, first: int, second: int) -> bool:
    return bool(spans.arrival_ns[second] + SLACK_S * 1e9 >= spans.end_ns[first])


def _is_one_clock(spans: EngineSpans, first: int, second: int) -> bool:
    """Return whether two engines name one machine.

    Several may have one name: it counts where their stamps do not contradict it.
    """
    return bool(spans.machine[first] and spans.machine[first] == spans.machine[second]) and _is_later(
        spans, first, second
    )


def _of_two(spans: EngineSpans, first: int, second: int) -> ExactTimes:
    """Return the times of a request by the spans of its two engines.

    By the first one's clock, as if the second had had it as soon as the first had ended: no stamp of the one is
    compared with one of the other, but for `hand_over_s`.
    """
    first_s = (spans.end_ns[first] - spans.arrival_ns[first]) / 1e9
    inner_s = {name: _added(getattr(spans, f"{name}_s")[[first, second]]) for name in INNER_TIMES}
    inner_s |= {"first_step": float(spans.prefill_s[second]), "decode_queue": float(spans.queue_s[second])}
    return ExactTimes(
        queue_s=float(spans.queue_s[first]),
        prefill_s=float(spans.prefill_s[first]),
        decode_s=float(spans.decode_s[second]),
        ttft_s=first_s + float(spans.ttft_s[second]),
        e2e_s=first_s + float(spans.e2e_s[second]),
        inner_s=inner_s,
        arrival_ns=int(spans.arrival_ns[first]),
        end_ns=int(spans.end_ns[first] + spans.end_ns[second] - spans.arrival_ns[second]),
        span_id=spans.span_id[first],
        trace_id=spans.trace_id[first],
        clock=spans.clock[first],
        place=first,
        next_place=second,
        hand_over_s=(spans.arrival_ns[second] - spans.end_ns[first]) / 1e9,
        hand_over_by="" if _is_one_clock(spans, first, second) else " and ".join(spans.clock[[first, second]]),
    )


def _of_two_at_once(spans: EngineSpans, first: int, second: int) -> ExactTimes:
    """Return the times of a request that two engines had from the start.

    The second waits for the first within its own TTFT, so that no stamps are compared: what neither tells of it stays
    with its API server. Of undivided spans the TTFT is known by their router's calls alone.
    """
    undivided = _is_undivided(spans.engine[first])
    stamped, lasts_ns = first if undivided else second, int(spans.end_ns[second] - spans.arrival_ns[second])
    inner_s = {name: float(getattr(spans, f"{name}_s")[first]) for name in INNER_TIMES}
    inner_s |= {name: float(getattr(spans, f"{name}_s")[second]) for name in ("decode_queue", "first_step")}
    return ExactTimes(
        queue_s=float(spans.queue_s[first]),
        prefill_s=float(spans.prefill_s[first]),
        decode_s=float(spans.decode_s[second]),
        ttft_s=float(spans.ttft_s[second]),
        e2e_s=lasts_ns / 1e9 if undivided else float(spans.e2e_s[second]),
        inner_s=inner_s,
        arrival_ns=int(spans.arrival_ns[stamped]),
        end_ns=int(spans.arrival_ns[stamped]) + lasts_ns,
        span_id=spans.span_id[stamped],
        trace_id=spans.trace_id[stamped],
        clock=spans.clock[stamped],
        place=first,
        next_place=second,
        reason=UNDIVIDED if undivided else "",
    )


def _added(times_s: Floats) -> float:
    """Return the sum of the known times, NaN where none is known."""
    return float(np.nansum(times_s)) if np.isfinite(times_s).any() else float("nan")


def _of_spans(
    row: int, spans: EngineSpans, places: Sequence[int], taken: set[int], why: Sequence[list[str]], owners: Owners
) -> Iterator[tuple[int, ExactTimes]]:
    selection = own_spans(owners, row, spans, places)
    # Beside its own span, one with the id of another request is that one's: contexts leak between requests.
    others = set() if isinstance(selection, Refusal) else set(places).difference(selection)
    taken.update(place for place in places if place not in others or not _is_others(owners, row, spans, place))
    times = None if isinstance(selection, Refusal) else span_times(spans, selection, places)
    if times is not None:
        yield row, times
        return
    faults = dict.fromkeys(spans.fault[place] for place in places if spans.fault[place])
    if isinstance(selection, Refusal):
        why[row].append(selection)
    elif faults:
        why[row].append(Refusal(f"its span {' and '.join(faults)}: refused"))
    else:
        why[row].append(Refusal("its span tells neither queue nor prefill"))


def _filled_cache(spans: EngineSpans, place: int, first: int) -> bool:
    """Return whether a span filled the cache for a choice: no token, ended before its first."""
    return bool(
        np.isnan(spans.ttft_s[place])
        and np.isfinite(spans.ttft_s[first])
        and spans.clock[place] == spans.clock[first]
        and abs(spans.arrival_ns[place] - spans.arrival_ns[first]) <= SLACK_S * 1e9
        and spans.end_ns[place] <= _first_token_ns(spans, first)
    )


def _is_others(owners: Owners, row: int, spans: EngineSpans, place: int) -> bool:
    return owners.bears_id(row, spans.engine[place], spans.request_id[place]) is False


def _stating(spans: EngineSpans, places: Sequence[int]) -> list[int]:
    """Return the spans that state a time; those around an engine whose whole is all that they tell, if no others do."""
    stating = [
        place
        for place in places
        if np.isfinite([spans.queue_s[place], spans.prefill_s[place]]).any()
        or (spans.role[place] == "decode" and not spans.fault[place])
    ]
    divided = [place for place in stating if not _is_undivided(spans.engine[place])]
    return divided or (stating if "prefill" in spans.role[stating] else [])


@cache
def _is_undivided(engine: str) -> bool:
    rules = engines.catalogue(engine).spans
    return rules is not None and rules.is_undivided


def _are_one(
    requests: RequestLog, row: int, spans: EngineSpans, places: Sequence[int], *, strictly: bool = False
) -> bool:
    """Return whether several spans are of one request.

    Not `strictly`, that also holds where neither ids nor tokens tell.
    """
    if len(places) < 2:
        return False
    is_shared = _are_halves(spans, places, _counted(requests, row))
    return is_shared or _are_alike(requests, row, spans, places, strictly=strictly)


def _are_alike(
    requests: RequestLog, row: int, spans: EngineSpans, places: Sequence[int], *, strictly: bool = False
) -> bool:
    """Return whether several spans are a request's steps, prompts or choices."""
    return (
        _are_steps(spans, places)
        or _are_prompts(spans, places)
        or (requests.choices[row] != 1 and _are_choices(spans, places, _counted(requests, row), strictly=strictly))
    )


def _are_choices(spans: EngineSpans, places: Sequence[int], counted: int, *, strictly: bool) -> bool:
    """Return whether spans may be choices of one request.

    Choices begin together, and their tokens add up to the client's count.
    """
    arrivals_ns, stated = spans.arrival_ns[list(places)], spans.output_tokens[list(places)]
    if len(set(spans.clock[list(places)])) > 1 or np.ptp(arrivals_ns) > SLACK_S * 1e9:
        return False
    return not strictly if counted < 0 or stated.max() < 0 else int(np.maximum(stated, 0).sum()) == counted


def _are_prompts(spans: EngineSpans, places: Sequence[int]) -> bool:
    """Return whether the ids of spans differ only in the number of the prompt."""
    parted = [text.rpartition("-") for text in spans.request_id[list(places)].tolist()]
    numbers = {number for _, _, number in parted}
    is_numbered = any(form.endswith("-{n}") for form in _forms(spans.engine[places[0]]))
    return is_numbered and len({root for root, _, _ in parted}) == 1 and numbers == set(map(str, range(len(places))))


def _are_steps(spans: EngineSpans, places: Sequence[int]) -> bool:
    """Return whether spans are consecutive steps of one search."""
    known = [(engines.catalogue(spans.engine[place]).spans, spans.request_id[place]) for place in places]
    searches = {form.request_of_step(text) if form else "" for form, text in known}
    return len(searches) == 1 and "" not in searches


def _are_halves(spans: EngineSpans, places: Sequence[int], counted: int) -> bool:
    """Return whether spans are of engines that shared a request. All but the last had one token, of the same prompt."""
    ordered = _in_order(spans, places)
    if sorted(spans.role[places]) == ["decode", "prefill"]:
        return True
    *firsts, last = spans.output_tokens[ordered].tolist()
    ids, prompts = set(spans.request_id[ordered].tolist()), set(spans.input_tokens[ordered].tolist())
    is_one = (len(ids) == 1 and "" not in ids) or (len(prompts) == 1 and -1 not in prompts)
    return is_one and set(firsts) == {1} and counted in (-1, last)


def _in_order(spans: EngineSpans, places: Sequence[int]) -> list[int]:
    """Return the spans of a request in the order in which they served it. Their clocks need not agree on that."""
    return sorted(places, key=lambda place: (spans.role[place] != "prefill", spans.arrival_ns[place]))


def _counted(requests: RequestLog, row: int) -> int:
    """Return the server's output token count for the client, -1 if missing."""
    return int(requests.output_tokens[row]) if requests.output_tokens_source[row] == "usage" else -1


def _with_its_tokens(requests: RequestLog, row: int, spans: EngineSpans, places: Sequence[int]) -> list[int]:
    """Return the spans that count the client's tokens, as far as both count them."""
    pairs = ((int(requests.input_tokens[row]), spans.input_tokens), (_counted(requests, row), spans.output_tokens))
    return [
        place
        for place in places
        if all(counted < 0 or stated[place] < 0 or stated[place] == counted for counted, stated in pairs)
    ]


def _at_its_first_output(requests: RequestLog, row: int, spans: EngineSpans, places: Sequence[int]) -> list[int]:
    """Return the spans during which the client's first output came.

    That is if all lie within the request; all spans where the clocks leave it open.
    """
    submit_ns, output_ns, ended_ns = (
        int(column[row]) for column in (requests.submit_ns, requests.first_output_ns, requests.end_ns)
    )
    arrival_ns, end_ns = spans.arrival_ns[list(places)], spans.end_ns[list(places)]
    if min(submit_ns, output_ns, ended_ns, *arrival_ns) < 0 or len(set(spans.clock[list(places)])) > 1:
        return list(places)
    slack_ns = round(SLACK_S * 1e9)
    least_ns, most_ns = submit_ns - int(arrival_ns.min()) - slack_ns, ended_ns - int(end_ns.max()) + slack_ns
    if least_ns > most_ns:
        return list(places)
    firsts_ns = np.array([_first_token_ns(spans, place) for place in places])
    fits = (end_ns + most_ns >= output_ns) & (firsts_ns + least_ns <= output_ns)
    return [place for place, fit in zip(places, fits.tolist(), strict=True) if fit]


@cache
def _forms(engine: str) -> tuple[str, ...]:
    known = engines.catalogue(engine).spans
    return () if known is None else known.ids


@cache
def _patterns(engine: str) -> tuple[re.Pattern[str], ...]:
    """Return the patterns that extract the client's id from an engine's id."""
    escaped = (re.escape(form) for form in _forms(engine))
    known = (re.sub(r"\\{(request|response)\\}", "(?P<id>.+)", form).replace(r"\{n\}", r"\d+") for form in escaped)
    return tuple(map(re.compile, known))


def _of_form(form: str, request_id: str, response_id: str, places: Mapping[str, Sequence[int]]) -> list[int]:
    if ("{request}" in form and not request_id) or ("{response}" in form and not response_id):
        return []
    rows: list[int] = []
    for prompt in range(len(places)):
        bearing = places.get(same_id(form.format(request=request_id, response=response_id, n=prompt)), ())
        rows.extend(bearing)
        if not bearing or "{n}" not in form:
            break
    return rows


def _places(column: Texts, without: Collection[int]) -> dict[str, list[int]]:
    """Return where each text stands."""
    places: dict[str, list[int]] = {}
    for place, text in enumerate(column.tolist()):
        if text and place not in without:
            places.setdefault(text, []).append(place)
    return places


def _first_token_ns(spans: EngineSpans, place: int) -> float:
    """Return the time of a span's first token: arrival and TTFT, else the parts that it states."""
    ttft_s = spans.ttft_s[place]
    if np.isnan(ttft_s):
        ttft_s = np.nansum([spans.queue_s[place], spans.prefill_s[place]])
    return float(spans.arrival_ns[place] + 1e9 * ttft_s)
