"""Work of engines while requests waited for them: time of a wait by the requests that were computed meanwhile.

Exact by the spans of all requests, for one rule. Between two stamps of any requests an engine divides its time among
those that it computes, by tokens: one that decodes counts 1, one in its prefill the tokens of its uncached prompt that
fall there. Where a prompt is computed over several such stretches, no span tells how much in which: the prompts are
laid so that the engine's pace, in prompt tokens a second, is as even as they allow. No stamps of two clocks are
compared: each process is an engine of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sidelight.correlator.exact.table import Joined
from sidelight.loadgen.requests.metrics import input_tokens
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Indices, Ints, Texts
from sidelight.rundir.stats import Missing
from sidelight.scraper.spans.requests import EngineSpans

LEAST_COVERAGE = 0.95
MOST_PAIRS = 4_000_000  # of prompts and stretches: some 100 MB
ROUNDS = 20
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """Columns of m stays of requests at engines; a request that two engines shared has two.

    row           of the request
    engine        whose clock stamped it (`EngineSpans.clock`), of an unnamed process the URL that was asked
    role          prefill or decode of an engine that shared it, else ""
    queued_ns, scheduled_ns, first_ns, end_ns  int64 by the engine's clock: where its queue, its prefill and its
                  decode begin, and its end
    tokens        int64, uncached ones of its prompt, at least 1; of a decode engine the one that it computes
    requests      number of requests that the engines may have had, and `covered` the share of them with stays
    uncounted     requests with stays whose cached tokens are not stated: all of their prompt counts
    """

    row: Ints
    engine: Texts
    role: Texts
    queued_ns: Ints
    scheduled_ns: Ints
    first_ns: Ints
    end_ns: Ints
    tokens: Ints
    requests: int
    covered: float
    uncounted: int

    def __len__(self) -> int:
        return len(self.row)


def stays_of(requests: RequestLog, joined: Joined, spans: EngineSpans) -> Stays | Missing:
    """Return the stays of requests, or the reason why too few of them are known."""
    prompt, shared = input_tokens(requests), joined.next_place >= 0
    # A decode engine's reply counts what its prefill engine computed as cached.
    cached = np.where(shared, -1, requests.cached_tokens)
    with np.errstate(invalid="ignore"):
        times_s = np.array([spans.queue_s, spans.prefill_s, spans.ttft_s])
    is_whole = np.append(np.isfinite(times_s).all(axis=0), False)  # the last place is that of no span
    known = is_whole[joined.place] & (is_whole[joined.next_place] | ~shared) & np.isfinite(prompt)
    sent = (requests.submit_ns >= 0) & (requests.http_status < 400)
    covered = float((known & sent).sum()) / max(1, int(sent.sum()))
    if covered < LEAST_COVERAGE:
        return Missing(
            f"engines' spans with their times came for {100 * covered:.0f} % of the requests, "
            "and what was computed for the others is not known"
        )
    row = np.concatenate([np.flatnonzero(known), np.flatnonzero(known & shared)])
    is_second = np.arange(len(row)) >= int(known.sum())
    place = np.where(is_second, joined.next_place[row], joined.place[row])
    first_ns = spans.arrival_ns[place] + _ns(spans.ttft_s[place])
    scheduled_ns = first_ns - _ns(spans.prefill_s[place])
    decoded_s = np.where(shared[row] & ~is_second, 0.0, np.nan_to_num(spans.decode_s[place]))
    uncached = prompt[row] - np.maximum(cached[row], 0)
    return Stays(
        row=row,
        engine=np.where(spans.clock[place] == "", requests.endpoint_url[row], spans.clock[place]),
        role=np.select([is_second, shared[row]], ["decode", "prefill"], "").astype(np.object_),
        queued_ns=scheduled_ns - _ns(spans.queue_s[place]),
        scheduled_ns=scheduled_ns,
        first_ns=first_ns,
        end_ns=first_ns + _ns(decoded_s),
        tokens=np.where(is_second, 1, np.maximum(uncached, 1)).astype(np.int64),
        requests=int(sent.sum()),
        covered=covered,
        uncounted=int((known & (cached < 0)).sum()),
    )


def _ns(seconds: Floats) -> Ints:
    return np.rint(1e9 * seconds).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStretches:
    """One engine's time, cut into b stretches by the stamps of its n stays.

    rows, first, end     stays [n], and the stretches at which each begins to decode and has ended
    bounds_ns            [b + 1]
    token_s              what a token had of each stretch, s [b]; 0 where nothing was computed
    prompt, at, tokens   a stay, a stretch, and how many tokens of its prompt are laid there; for all such pairs
    """

    rows: Indices
    first: Indices
    end: Indices
    bounds_ns: Ints
    token_s: Floats
    prompt: Indices
    at: Indices
    tokens: Floats


def stretches_of(stays: Stays) -> dict[str, EngineStretches] | Missing:
    """Return the stretches of each engine, by its name."""
    engines = {name: np.flatnonzero(stays.engine == name) for name in sorted(set(stays.engine.tolist()))}
    cut = {name: _cut(stays, rows) for name, rows in engines.items()}
    most = max((int((first - begin).sum()) for _, begin, first, _ in cut.values()), default=0)
    if most > MOST_PAIRS:
        return Missing(f"{most:,} stretches of prefills: too many at the same time for an engine that batches them")
    return {name: _stretches(stays, engines[name], *cut[name]) for name in engines}


def _cut(stays: Stays, rows: Indices) -> tuple[Ints, Indices, Indices, Indices]:
    """Return the bounds of an engine's stretches, and the places of stamps among them."""
    stamps = np.stack([column[rows] for column in (stays.scheduled_ns, stays.first_ns, stays.end_ns)])
    bounds_ns, places = np.unique(stamps, return_inverse=True)
    begin, first, end = places.reshape(stamps.shape)
    return bounds_ns, begin, first, end


def _stretches(
    stays: Stays, rows: Indices, bounds_ns: Ints, begin: Indices, first: Indices, end: Indices
) -> EngineStretches:
    lasts_s = np.diff(bounds_ns) / 1e9
    each = np.repeat(np.arange(len(rows)), first - begin)
    at = np.arange(len(each)) - np.repeat(np.cumsum(first - begin) - first, first - begin)
    tokens = _evenly_laid(stays.tokens[rows], each, at, lasts_s)
    load = np.bincount(at, tokens, len(lasts_s)) + _decoding(first, end, len(lasts_s))
    return EngineStretches(
        rows=rows,
        first=first,
        end=end,
        bounds_ns=bounds_ns,
        token_s=np.divide(lasts_s, load, out=np.zeros(len(lasts_s)), where=load > 0),
        prompt=rows[each],
        at=at,
        tokens=tokens,
    )


def _evenly_laid(prompts: Ints, each: Indices, at: Indices, lasts_s: Floats) -> Floats:
    """Return the tokens of each pair of a prompt and a stretch.

    By iterative proportional fitting (Deming and Stephan 1940) of the stretches to one pace, and of the prompts.
    """
    tokens = lasts_s[at]
    busy_s = lasts_s[np.unique(at)].sum()
    for _ in range(ROUNDS):
        tokens *= (prompts / np.maximum(np.bincount(each, tokens, len(prompts)), _TINY))[each]
        laid = np.bincount(at, tokens, len(lasts_s))
        tokens *= (lasts_s * laid.sum() / busy_s / np.maximum(laid, _TINY))[at]
    return tokens * (prompts / np.maximum(np.bincount(each, tokens, len(prompts)), _TINY))[each]


def _decoding(first: Indices, end: Indices, count: int) -> Ints:
    """Return the number of decoding requests in each stretch."""
    return np.cumsum(np.bincount(first, minlength=count + 1) - np.bincount(end, minlength=count + 1))[:count]


def used_while_waiting(stays: Stays, engine: EngineStretches, at: int) -> tuple[Floats, Floats]:
    """Return each stay's use of one wait [m], s: by its prefill, and by its decode.

    The wait is that of stay `at`. They add up to the wait, but for moments
    in which nothing was computed. Its prefill is a part of it.
    """
    waited_ns = np.clip(engine.bounds_ns, stays.queued_ns[at], stays.first_ns[at])
    token_s = engine.token_s * np.diff(waited_ns) / np.diff(engine.bounds_ns)
    by_then_s = np.concatenate([[0.0], np.cumsum(token_s)])
    decode_s = np.zeros(len(stays))
    decode_s[engine.rows] = by_then_s[engine.end] - by_then_s[engine.first]
    prefill_s = np.bincount(engine.prompt, engine.tokens * token_s[engine.at], len(stays))
    return prefill_s.astype(np.float64), decode_s


def used_by_groups(stays: Stays, engines: Iterable[EngineStretches], groups: Ints, count: int) -> Floats:
    """Return the use of each wait by groups, s [m, count, 2]: prefill, decode.

    What a stay used of its wait is left out. `groups` [m] are numbers below `count`.
    """
    used_s = np.zeros((len(stays), count, 2))
    for engine in engines:
        rows, size = engine.rows, len(engine.token_s)
        queued_ns, first_ns = (stamps_ns[rows] - engine.bounds_ns[0] for stamps_ns in (stays.queued_ns, stays.first_ns))
        for group in range(count):
            of_group = groups[engine.prompt] == group
            decoding = groups[rows] == group
            prompts = np.bincount(engine.at[of_group], engine.tokens[of_group], size)
            for phase, load in enumerate((prompts, _decoding(engine.first[decoding], engine.end[decoding], size))):
                by_then_s = np.concatenate([[0.0], np.cumsum(engine.token_s * load)])
                until_s = [np.interp(at_ns, engine.bounds_ns - engine.bounds_ns[0], by_then_s)
                           for at_ns in (first_ns, queued_ns)]  # fmt: skip
                used_s[rows, group, phase] = until_s[0] - until_s[1]
        itself_s = np.bincount(engine.prompt, engine.tokens * engine.token_s[engine.at], len(stays))
        used_s[rows, groups[rows], 0] -= itself_s[rows]
    return np.maximum(used_s, 0.0)
