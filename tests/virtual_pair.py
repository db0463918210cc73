"""A prefill engine and then a decode engine in virtual time, under a load that both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from virtual_runs import endpoint_of

from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.statistics.server_times import ServerMeans, server_means
from sidelight.scraper.window.window import Window
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import EngineSettings, SimulatorSettings, SpeedProfile
from sidelight.simulator.virtual import EPOCH_NS, Played, SimulatedLoad, VirtualServer


def play_pair(
    sent: Sequence[EngineRequest],
    offsets_ns: Sequence[int],
    engines: tuple[EngineSettings, EngineSettings],
    *,
    hold_s: float = 0.0,
    scrapes_s: tuple[float | None, float],
) -> tuple[Played, Played]:
    """Play a load on the first engine and then, since nothing comes back to it, on the second."""
    prefill, decode = (VirtualServer(SimulatorSettings(engine_settings=each)) for each in engines)
    first = prefill.play(
        SimulatedLoad(requests=[replace(request, max_tokens=1) for request in sent], offsets_ns=offsets_ns),
        scrape_s=scrapes_s[0],
    )
    asked = {request.request_id: request.max_tokens for request in sent}
    ended = sorted(first.exchanges, key=lambda each: each.end_ns)
    loaded = [replace(each.request, max_tokens=asked[each.request.request_id], remote_prefill=True) for each in ended]
    starts_ns = [each.end_ns - EPOCH_NS + round(hold_s * 1e9) for each in ended]
    return first, decode.play(SimulatedLoad(requests=loaded, offsets_ns=starts_ns), scrape_s=scrapes_s[1])


def poisson_means(seed: Sequence[int], *, requests: int, per_s: float) -> ServerMeans:
    """The means of a load by nothing but both engines' pages, as a report has them."""
    pair = poisson_pair(seed, requests=requests, per_s=per_s)
    prefill, decode = (observed for each in pair if isinstance(observed := observe(endpoint_of(each)), Observed))
    ended = pair[1].exchanges
    submit_ns = {each.request.request_id: each.submit_ns for each in pair[0].exchanges}
    waits_s = [(each.token_ns[0] - submit_ns[each.request.request_id]) / 1e9 for each in ended]
    window = Window(start_ns=EPOCH_NS, end_ns=pair[1].pages[-1].response_ns + 1)
    return server_means(
        np.array([each.end_ns for each in ended]), np.array(waits_s), [prefill], window, decoding=[decode]
    )


def poisson_pair(seed: Sequence[int], *, requests: int, per_s: float) -> tuple[Played, Played]:
    """Play Poisson arrivals on engines that have a queue each, scraped every 0.5 s.

    Prompts are log-normal, 200 tokens in the median, outputs of 4 to 19 tokens. The prefill engine is busy for 60 % of
    the time at 12 requests/s. The decode engine has 2 places, and loads a cache in 150 ms.
    """
    random = np.random.default_rng(seed)
    at_ns = np.cumsum(random.exponential(1e9 / per_s, requests)).astype(np.int64)
    lengths = np.clip(random.lognormal(np.log(200), 0.5, requests), 8, 2000).astype(int)
    tokens = random.integers(4, 20, requests)
    sent = [
        EngineRequest(request_id=f"cmpl-{number}", prompt_token_ids=(number,) * length, max_tokens=asked)
        for number, (length, asked) in enumerate(zip(lengths.tolist(), tokens.tolist(), strict=True))
    ]
    speed = SpeedProfile(step_s=8e-3, prefill_token_s=2e-4, sequence_s=2e-4, kv_token_s=2e-7, jitter_ratio=0.05)
    seeds = random.integers(10**9, size=2).tolist()
    prefill = EngineSettings(kv_role="prefill", max_num_seqs=1, speed=speed, seed=seeds[0], prefix_caching=False)
    decode = EngineSettings(kv_role="decode", max_num_seqs=2, kv_latency_s=0.15, seed=seeds[1], prefix_caching=False)
    return play_pair(sent, at_ns.tolist(), (prefill, decode), scrapes_s=(0.5, 0.5))
