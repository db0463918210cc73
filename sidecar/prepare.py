"""What is found out and made before any load: the target, its metrics pages, the tokenizer, and the exact requests."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadgen import workloads
from loadgen.arrivals import offsets_ns
from loadgen.frames import append_record, open_log
from loadgen.plan import Planned, PlanOrder, plan
from loadgen.protocols.openai import Target
from loadgen.records import plan_end
from loadgen.tokenizers import ReferenceTokenizer, ServerTokenizer, Tokenizer, TokenizerError, probe_server
from scraper.access import Access, masked
from scraper.endpoint import Limits, discover
from scraper.missing import Missing
from sidecar.access import metrics_access
from sidecar.config import RunOptions, ScrapeOptions
from sidecar.errors import ConfigurationError, TargetSpeaksElse, TargetUnreachable
from sidecar.progress import Progress
from sidecar.target import Served, auth_headers, engine_version, preflight, probe

PER_SLOT_PER_S = 2.0
LEAST_PER_SLOT = 10
MOST_PREPARED = 20_000
SAY_EVERY = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run needs to know of its target. `targets` are metrics URLs; `notes` what the reader must be told once."""

    served: Served
    tokenizer: Tokenizer
    targets: tuple[str, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]


@asynccontextmanager
async def prepared(options: RunOptions, *, progress: Progress) -> AsyncIterator[Prepared]:
    """Look at the target of a run; the server's tokenizer, where it is used, stays open inside the block.

    Raises TargetUnreachable, TargetSpeaksElse, ConfigurationError.
    """
    if options.url is None:
        raise AssertionError("checked options have a URL")
    headers = auth_headers(options.api_key)
    served = await probe(options.url, model=options.model, api_key=options.api_key)
    await preflight(served, endpoint=options.endpoint, headers=headers, ignore_eos=options.ignore_eos)
    version = await engine_version(served.url, headers)
    access = metrics_access(options, url=options.url, api_key=options.api_key)
    metrics = await _targets(options.metrics or (served.url,), access, options.scrape_timeout)
    targets, notes = _scraped(metrics)
    tokenizer, unused = await _tokenizer(options, served, headers)
    limit = f", up to {served.max_model_len} tokens" if served.max_model_len else ""
    progress.stage(f"{served.model} at {served.url}{limit}; lengths in tokens of {tokenizer.name}")
    try:
        yield Prepared(
            served=served,
            tokenizer=tokenizer,
            targets=targets,
            notes=notes,
            about={
                "target": {
                    "url": served.url,
                    "model": served.model,
                    "max_model_len": served.max_model_len,
                    "version": version,
                },
                "tokenizer": _declared(tokenizer, unused),
                **_about_metrics(metrics),
            },
        )
    finally:
        if isinstance(tokenizer, ServerTokenizer):
            await tokenizer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScrape:
    """What a scrape without load needs to know; as in Prepared."""

    targets: tuple[str, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]


async def prepare_scrape(options: ScrapeOptions) -> PreparedScrape:
    """Find the pages of a scrape. Raises TargetUnreachable when there is none at all."""
    configured = options.metrics or (options.url or "",)
    metrics = await _targets(configured, metrics_access(options), options.scrape_timeout)
    targets, notes = _scraped(metrics)
    if not targets:
        reasons = "; ".join(found.reason for _, found in metrics if isinstance(found, Missing))
        raise TargetUnreachable(f"no metrics page: {reasons}")
    return PreparedScrape(targets=targets, about=_about_metrics(metrics), notes=notes)


def warmup_plan(options: RunOptions, found: Prepared) -> AsyncGenerator[Planned, None]:
    """Return the warm-up's requests: the same workload from another seed, so that no measured prompt is cached."""
    seed = int(np.random.SeedSequence(options.seed, spawn_key=(1,)).generate_state(1)[0])
    order = PlanOrder(phase="warmup", count=options.warmup, **_limits(options, found))
    return _plan(options, found, order, seed)


def measure_plan(options: RunOptions, found: Prepared) -> AsyncGenerator[Planned, None]:
    """Return the measured requests, in order. Raises ConfigurationError when the schedule has none."""
    offsets = None
    if options.rate is not None:
        offsets = offsets_ns(
            options.arrival, options.rate, seed=options.seed, count=options.requests, duration_s=options.duration
        )
        if not len(offsets):
            raise ConfigurationError(
                f"--rate {options.rate:g} --duration {options.duration:g}: no request falls into it; raise one of them"
            )
    order = PlanOrder(
        phase="measure",
        first_index=options.warmup,
        offsets_ns=offsets,
        count=planned_requests(options),
        **_limits(options, found),
    )
    return _plan(options, found, order, options.seed)


def _limits(options: RunOptions, found: Prepared) -> dict[str, Any]:
    return {"max_model_len": found.served.max_model_len, "ignore_eos": options.ignore_eos}


def planned_requests(options: RunOptions) -> int | None:
    """Return how many requests to prepare; None: as many as the open loop's schedule has.

    A closed loop that only a duration ends gets what its slots could use up at two requests a second each. They are all
    made before the load, so that nothing but the load reaches the engine while it is measured.
    """
    if options.requests is not None or options.concurrency is None or options.duration is None:
        return options.requests
    per_slot = max(LEAST_PER_SLOT, math.ceil(PER_SLOT_PER_S * options.duration))
    return min(MOST_PREPARED, options.concurrency * per_slot)


async def write_plan(requests: AsyncGenerator[Planned, None], path: Path, *, progress: Progress) -> dict[str, Any]:
    """Write requests to a plan. Returns what to record of them.

    Raises TargetSpeaksElse when the server's tokenizer stops answering.
    """
    digest = hashlib.sha256()
    count = clipped_inputs = clipped_outputs = 0
    phase = path.stem.removeprefix("plan-")
    log = open_log(path)
    try:
        async with aclosing(requests):
            async for one in requests:
                append_record(log, one.request)
                digest.update(one.request.body)
                count += 1
                clipped_inputs += one.clipped_input
                clipped_outputs += one.clipped_output
                if count % SAY_EVERY == 0:
                    progress.stage(f"prepared {count} requests")
        append_record(log, plan_end(phase))
    except TokenizerError as error:
        raise TargetSpeaksElse(f"the server's tokenizer: {error}; try --tokenizer cl100k_base") from error
    finally:
        os.close(log)
    return {
        "phase": phase,
        "count": count,
        "clipped_inputs": clipped_inputs,
        "clipped_outputs": clipped_outputs,
        "sha256": digest.hexdigest(),
    }


def _plan(options: RunOptions, found: Prepared, order: PlanOrder, seed: int) -> AsyncGenerator[Planned, None]:
    target = Target(base_url=found.served.url, model=found.served.model, endpoint=options.endpoint)
    return plan(workloads.requests(options.workload, seed=seed), target=target, tokenizer=found.tokenizer, order=order)


async def _targets(configured: tuple[str, ...], access: Access, timeout_s: float) -> list[tuple[str, str | Missing]]:
    limits = Limits(timeout_s=timeout_s)
    found = await asyncio.gather(*(discover(url, access=access, limits=limits) for url in configured))
    return list(zip(configured, found, strict=True))


async def _tokenizer(options: RunOptions, served: Served, headers: Mapping[str, str]) -> tuple[Tokenizer, str | None]:
    """Return the declared tokenizer and, where the server's was wanted but there is none, why."""
    if options.tokenizer == "cl100k_base":
        return ReferenceTokenizer(), None
    probed = await probe_server(served.url, served.model, headers)
    if isinstance(probed, ServerTokenizer):
        return probed, None
    if options.tokenizer == "server":
        raise ConfigurationError(f"--tokenizer server: {probed}; use --tokenizer cl100k_base")
    return ReferenceTokenizer(), probed


def _declared(tokenizer: Tokenizer, unused: str | None) -> dict[str, Any]:
    native = isinstance(tokenizer, ServerTokenizer)
    return {
        "name": tokenizer.name,
        "version": tokenizer.version,
        "vocab_size": tokenizer.vocab_size,
        "source": tokenizer.source,
        "option": "A, native" if native else "B, reference",
        **({"why_not_the_servers": unused} if unused else {}),
    }


def _about_metrics(metrics: list[tuple[str, str | Missing]]) -> dict[str, Any]:
    reasons = [found.reason for _, found in metrics if isinstance(found, Missing)]
    return {
        "metrics_targets": [
            {
                "configured": masked(configured),
                **({"reason": found.reason} if isinstance(found, Missing) else {"url": masked(found)}),
            }
            for configured, found in metrics
        ],
        **({"server_missing": "; ".join(reasons)} if len(reasons) == len(metrics) else {}),
    }


def _scraped(metrics: list[tuple[str, str | Missing]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the URLs to scrape, and what to say of those that are not.

    Beside one that answers, a page that was named and did not is asked all the same: an engine that is starting will
    show it, and scrapes that fail are told. What speaks something else is left alone.
    """
    answers = any(isinstance(found, str) for _, found in metrics)
    targets, notes = [], []
    for configured, found in metrics:
        if isinstance(found, str):
            targets.append(found)
        elif answers and "metrics" in urlsplit(configured).path and "speaks something else" not in found.reason:
            targets.append(configured)
        else:
            notes.append(f"no server metrics: {found.reason}; name the page with --metrics URL")
    return tuple(targets), tuple(notes)
