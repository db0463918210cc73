"""The twin of requests: its engine's fit and test, and its traffic; and that of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sidelight.correlator.exact.join import join
from sidelight.correlator.opening import WatchRun
from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.recorded.run import Run
from sidelight.rundir.columns import Floats, Ints, Texts, same_text, take
from sidelight.rundir.printable.text import printable
from sidelight.rundir.stats import Missing
from sidelight.twin.check import engine_of, misfit, refusal
from sidelight.twin.engine.fit import LEAST_REQUESTS, EngineFit, EngineRequests, fit
from sidelight.twin.engine.play import BLOCKS, BUDGET, SEATS
from sidelight.twin.engine.spans import MOST_SPANNED, from_origin, spanned_requests
from sidelight.twin.engine.steps import StreamedRequests, streamed_requests
from sidelight.twin.scenario import Twin, span_s

#: Of the requests that were sent: others took steps that the fit cannot see.
LEAST_WHOLE, MOST_OTHERS = 0.95, 1.05
BLUR = 1.1  # of seats: stamps that jitter let more sequences seem to be in a step
NO_CLIENTS = (
    "no client or gateway before the engine sent spans. Let one send them, with the time of the first token; from the "
    "engine's spans alone `watch --slo` says the headroom"
)
FIRST_TOKENS = "clients' spans need the time of the first token, and they or the engine's the counts of tokens"
STREAMED = "run with streaming, known counts of tokens, and a load at which requests succeed"
OF_WATCH = (
    "15 minutes or more of traffic that these engines alone serve; or `sidelight capture`, and a run of its trace"
)
OF_RUN = (
    "a run of a minute or more at an open rate (run --rate 4 --duration 60s) against one engine that does nothing "
    "else, on a machine of its own"
)
OF_PAGES = (
    "pages of {pages} engines were scraped, and requests are known to be of {engines}: send to the engines themselves "
    "(--url, once for each), or let each send its spans; or give one page, and ask for several with --replicas. "
    "Prefill and decode engines that share requests are not predicted"
)
OF_SPANS = (
    "pages of {pages} engines were scraped, and spans name {engines}: let each engine send its spans, under a "
    "service.instance.id of its own. Engines without requests, that began in place of others, or that share requests "
    "as prefill and decode are not predicted"
)
_PROCESSES = ("poisson", "uniform", "gamma", "burst")


def twin_of(run: Run, finished: float, known: Mapping[str, int], *, pages: int = 1) -> Twin | Missing:
    """Return the twin of a run, or the reason against predictions.

    `finished` are the requests that engines' pages counted in the measured window, 0 where none does; `pages` is how
    many engines have one. `known` are settings of the engine.
    """
    rows = _rows_by_engine(run, pages)
    if 1 < pages != len(rows):
        return Missing((OF_SPANS if isinstance(run, WatchRun) else OF_PAGES).format(pages=pages, engines=len(rows)))
    requests = {name: _requests(run, each) for name, each in rows.items()}
    if reason := _unfit(run, sum(map(len, requests.values())), finished):
        return Missing(reason)
    twin = twin_of_engines({name: _latest(each) for name, each in requests.items()}, known)
    if isinstance(twin, Missing):
        return Missing(f"{twin.reason}. What helps: {OF_WATCH if isinstance(run, WatchRun) else OF_RUN}")
    measured = [_measured(run, rows[each.name], each) for each in twin.engines]
    if (few := min(map(len, measured))) < LEAST_REQUESTS:
        return Missing(f"{few} requests were measured, and a prediction needs {LEAST_REQUESTS}")
    config, longest_s, has_prefix_cache = run.manifest["config"], max(map(span_s, measured)), _has_prefix_cache(run)
    first, *beside = (
        replace(
            each,
            requests=of_engine,
            traffic=of_engine,
            duration_s=longest_s,
            arrival=_arrival(config, of_engine.submit_s, is_shared=bool(twin.beside)),
            concurrency=config.get("concurrency") if config.get("rate") is None else None,
            longest=(run.manifest.get("target") or {}).get("max_model_len"),
            has_prefix_cache=has_prefix_cache,
        )
        for each, of_engine in zip(twin.engines, measured, strict=True)
    )
    return replace(first, beside=tuple(beside))


def twin_of_engines(requests: Mapping[str, EngineRequests], known: Mapping[str, int]) -> Twin | Missing:
    """Return the twin of engines by the requests of each, or the reason against predictions.

    `known` settings of the engines are taken as they are. The misfit that refuses is the mean over their requests: that
    of each engine has more chance in it than all together.
    """
    twins: list[Twin] = []
    for name, of_engine in requests.items():
        twin = _twin(of_engine, known)
        if isinstance(twin, Missing):
            return Missing(f"{printable(name)}: {twin.reason}") if len(requests) > 1 else twin
        twins.append(replace(twin, name=name))
    first, *beside = sorted(twins, key=lambda each: -len(each.requests))
    logs, counts = [np.nan_to_num(each.missed.logs) for each in twins], [each.missed.requests for each in twins]
    missed = np.average(logs, axis=0, weights=counts)
    if reason := replace(first.missed, logs=missed).refusal:
        return Missing(next(filter(None, (_fewer_seats(each.requests, known) for each in twins)), reason))
    return replace(first, beside=tuple(beside))


def _twin(requests: EngineRequests, known: Mapping[str, int]) -> Twin | Missing:
    """Return the twin of an engine by its requests, or the reason against predictions."""
    seats = known.get(SEATS)
    fitted = fit(requests, budget=known.get(BUDGET), seats=seats)
    if isinstance(fitted, Missing):
        return fitted
    if seats is not None and fitted.most_sequences > BLUR * seats + 1:
        return Missing(
            f"max-num-seqs={seats} is stated, and {fitted.most_sequences} sequences were in a step: state the engine's"
        )
    engine = engine_of(fitted, kv_blocks=known.get(BLOCKS))
    missed = misfit(requests, fitted, engine)
    reason = missed.reason if isinstance(missed, Missing) else refusal(requests, fitted)
    if isinstance(missed, Missing) or reason:
        return Missing(_fewer_seats(requests, known) or reason)
    return Twin(
        requests=requests, fitted=fitted, engine=engine, missed=missed, traffic=requests, duration_s=span_s(requests)
    )


def _fewer_seats(requests: EngineRequests, known: Mapping[str, int]) -> str:
    """Return a reason where requests waited for fewer seats than are stated, else ""."""
    stated = known.get(SEATS)
    shown = None if stated is None else fit(requests)
    if stated is None or not isinstance(shown, EngineFit) or shown.seats is None or shown.seats >= stated:
        return ""
    return f"requests waited while {shown.seats} ran, and max-num-seqs={stated} is stated: state the engine's"


def _rows_by_engine(run: Run, pages: int) -> dict[str, Ints]:
    """Return the rows of requests by the engine that served them; those of the only one under ""."""
    log = run.requests
    served_by = same_text("", len(log)) if isinstance(run, WatchRun) else _addresses(run)
    if pages > 1 and isinstance(run, WatchRun):
        served_by = run.watched.parts.engine
    elif pages > 1 and len({*served_by.tolist()}) < 2:
        served_by = join(log, run.spans).clock
    names = sorted({*served_by.tolist()} - {""})
    if len(names) < 2:
        return {"": np.arange(len(log))}
    return {name: np.flatnonzero(served_by == name) for name in names}


def _addresses(run: Run) -> Texts:
    """Return the addresses of requests' servers as the run was given them: models may have paths of their own there."""
    urls: list[str] = run.requests.endpoint_url.tolist()
    given = sorted(run.manifest["config"].get("url") or (), key=len, reverse=True)
    by_url = {url: next((each for each in given if url.startswith(each)), url) for url in {*urls}}
    return np.array([by_url[url] for url in urls], np.object_)


def _requests(run: Run, rows: Ints) -> EngineRequests:
    """Return requests of a run by their tokens; those of a watch by their spans."""
    is_all = len(rows) == len(run.requests)  # which are many, and not copied
    log = run.requests if is_all else take(run.requests, rows)
    if isinstance(run, WatchRun):
        return spanned_requests(log, run.watched.parts if is_all else take(run.watched.parts, rows))
    return streamed_requests(log)


def _latest(requests: EngineRequests) -> EngineRequests:
    if isinstance(requests, StreamedRequests) or len(requests) <= MOST_SPANNED:
        return requests
    last = take(requests, np.arange(len(requests) - MOST_SPANNED, len(requests)))
    return from_origin(last, float(last.submit_s[0]))


def _measured(run: Run, rows: Ints, twin: Twin) -> EngineRequests:
    """Return the requests of an engine without those of warm-up."""
    counted = rows[run.requests.phase[rows] == "measure"]
    is_all = isinstance(run, WatchRun) or len(counted) == len(rows)
    return twin.requests if is_all else streamed_requests(take(run.requests, counted))


def _unfit(run: Run, whole: int, finished: float) -> str:
    """Return the reason against a fit to a run's requests, or "" without one; `whole` is their known number."""
    log = run.requests
    sent = int(np.sum(log.submit_ns >= 0))
    is_watch = isinstance(run, WatchRun)
    if not sent:
        return NO_CLIENTS if is_watch else "nothing was sent in it: give a run with a load"
    if whole < LEAST_WHOLE * sent:
        return (
            f"of {sent} requests {whole} succeeded with a prompt, an output and token times that are known, "
            f"and all others took steps that are not seen: {FIRST_TOKENS if is_watch else STREAMED}"
        )
    if (log.turn > 0).any():
        return (
            "its requests are turns of sessions, each of which waits for the reply before: `sidelight capture` makes a "
            "trace of it without sessions; a run of that can be predicted"
        )
    ok = int(np.sum((log.phase == "measure") & (log.status == "ok")))
    if finished > MOST_OTHERS * ok:
        whose = "spans of these clients show" if is_watch else "this run sent"
        return (
            f"the engine finished {finished:.0f} requests, and {whose} {ok}: the others took steps that are not seen. "
            f"{'Let all clients send spans' if is_watch else 'Run while nobody else uses the engine'}"
        )
    return ""


def _has_prefix_cache(run: Run) -> bool | None:
    """Return whether engines have a prefix cache, by vLLM's pages; None where none says or they differ."""
    stated = {value == "True" for value in run.stated("enable_prefix_caching")}
    return stated.pop() if len(stated) == 1 else None


def _arrival(config: dict[str, object], submit_s: Floats, *, is_shared: bool) -> Arrival | None:
    """Return the process of an engine's arrivals; None where gaps are drawn, as of engines that share a process."""
    kind = config.get("arrival")
    if kind == "replay":
        return Arrival(kind=kind, trace_ns=np.rint(1e9 * submit_s).astype(np.int64))
    if is_shared or config.get("rate") is None or config.get("trace") is not None or kind not in _PROCESSES:
        return None
    burstiness = config.get("burstiness")
    burstiness = float(burstiness) if isinstance(burstiness, int | float) else 1.0
    return Arrival(kind=kind, rate_per_s=1.0, burstiness=burstiness)  # type: ignore[arg-type]
