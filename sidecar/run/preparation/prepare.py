"""Checks before any load: the target, its metrics pages, the tokenizer, and the machine that loads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sidelight.loadgen.host.clock_sync import clock_state, clock_summary
from sidelight.loadgen.host.limits import outlasting, shortage
from sidelight.loadgen.host.round_trip import measure_rtt, round_trip
from sidelight.loadgen.plan import tokenizers
from sidelight.loadgen.plan.tokenizers import (
    FittingTokenizer,
    LocalTokenizer,
    ReferenceTokenizer,
    ServerTokenizer,
    TokenizerError,
    probe_server,
)
from sidelight.loadgen.protocols.request import RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import Tls, tls_context
from sidelight.rundir.printable.masking import register_headers, with_stand_ins
from sidelight.rundir.stats import Missing
from sidelight.sidecar.options.checks import named
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.preparation.pages import (
    about_metrics,
    contact_of,
    found_pages,
    pages_access,
    pages_of,
    scraped_pages,
    with_pages,
)
from sidelight.sidecar.run.preparation.planning import PlannedLoad, read_load
from sidelight.sidecar.run.preparation.preflight import preflight, refusal, without_fields
from sidelight.sidecar.run.preparation.target import (
    Contact,
    TargetInfo,
    engine_version,
    probe,
    proxy_note,
    unlisted_note,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Facts that a run needs before its start. `targets` are metrics URLs; `notes` are facts that the reader must know,
    once.
    """

    served: tuple[TargetInfo, ...]
    contact: Contact
    tokenizer: FittingTokenizer
    load: PlannedLoad
    targets: tuple[str, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def target(self) -> RequestTarget:
        """Return the target to write requests for. All URLs serve the same model."""
        first, (extra, _) = self.served[0], with_stand_ins(self.contact.extra)
        models = (first.model, *first.others) if first.others else ()
        return RequestTarget(model=first.model, models=models, endpoint=self.contact.endpoint, extra=extra)

    @property
    def stand_ins(self) -> dict[str, str]:
        """Return the stand-ins for secrets in planned requests, each with the secret that is sent."""
        return with_stand_ins(self.contact.extra)[1]

    @property
    def max_model_len(self) -> int | None:
        """Return the least of the lengths that the URLs state, None if all are missing."""
        return min((server.max_model_len for server in self.served if server.max_model_len is not None), default=None)


@asynccontextmanager
async def prepare(options: RunOptions, *, progress: Progress) -> AsyncIterator[Prepared]:
    """Prepare a run on its target. The server's tokenizer, where it is used, stays open inside the block.

    Raises TargetUnreachable, TargetIncompatible, ConfigurationError.
    """
    async with AsyncExitStack() as stack:
        load, shortfall, contact = read_load(options), _shortage(options), contact_of(options)
        for headers in load.header_sets:
            register_headers(headers.items())
        served = await _served(options, contact)
        _require_room(options, served)
        # Alone: what else this process does would show in the time of a handshake.
        round_trips = await asyncio.gather(*(measure_rtt(server.url) for server in served))
        version, metrics, (tokenizer, unused), refused = await _looked(
            options, served, contact, stack, say=progress.stage
        )
        targets, notes = scraped_pages(metrics)
        first = served[0]
        limit = f", up to {first.max_model_len} tokens" if first.max_model_len else ""
        where = ", ".join(server.url for server in served)
        progress.stage(f"{first.model} at {where}{limit}; tokenizer: {tokenizer.name}")
        yield Prepared(
            served=served,
            contact=without_fields(contact, refused),
            tokenizer=tokenizer,
            load=load,
            targets=targets,
            notes=(
                *filter(None, (proxy_note(options.url), *map(unlisted_note, served), shortfall)),
                *refused.values(),
                *load.notes,
                *notes,
            ),
            about={
                "target": {
                    "url": first.url,
                    **({"urls": [server.url for server in served]} if len(served) > 1 else {}),
                    "model": first.model,
                    **({"models": [first.model, *first.others]} if first.others else {}),
                    "max_model_len": first.max_model_len,
                    "version": version,
                    **({"refused_fields": list(refused)} if refused else {}),
                },
                "tokenizer": {
                    **tokenizers.about(tokenizer, exact=options.exact_tokens),
                    **({"why_not_the_servers": unused} if unused else {}),
                },
                "workload": load.about,
                "clock_state": msgspec.to_builtins(clock_summary(clock_state())),
                "network_rtt_ms": [
                    msgspec.to_builtins(round_trip(server.url, rtt))
                    for server, rtt in zip(served, round_trips, strict=True)
                ],
                **about_metrics(metrics),
            },
        )


def _require_room(options: RunOptions, served: Sequence[TargetInfo]) -> None:
    """Require lengths within the model's. Raises ConfigurationError for lengths given as numbers that are over it."""
    given = {"--input-tokens": options.input_tokens, "--output-tokens": options.output_tokens}
    lengths = {name: int(value) for name, value in given.items() if value is not None and value.isdecimal()}
    for server in served:
        if server.max_model_len is not None and sum(lengths.values()) > server.max_model_len:
            asked = " ".join(f"{name} {tokens}" for name, tokens in lengths.items())
            raise ConfigurationError(
                "model.length",
                f"{asked}: {server.model} takes {server.max_model_len} tokens at most, input and output together",
            )


async def _served(options: RunOptions, contact: Contact) -> tuple[TargetInfo, ...]:
    """Ask each URL for its model. Raises ConfigurationError where they serve different ones."""
    servers = [await probe(url, model=options.model, contact=contact) for url in options.url]
    for server in servers:
        if server.model != servers[0].model:
            raise ConfigurationError(
                "model.ambiguous",
                f"--url {server.url}: serves {server.model}, {servers[0].url} serves {servers[0].model}; "
                "choose one with --model",
            )
    return tuple(servers)


async def _looked(
    options: RunOptions,
    served: tuple[TargetInfo, ...],
    contact: Contact,
    stack: AsyncExitStack,
    *,
    say: Callable[[str], None],
) -> tuple[str | None, list[tuple[str, str | Missing]], tuple[FittingTokenizer, str | None], dict[str, str]]:
    """Ask each URL for one token, and meanwhile for its version, metrics pages and tokenizer.

    Last of the four results are the fields that a server refuses, each with what to say of it. The first failure ends
    the others, and is raised as it is.
    """
    urls = [server.url for server in served]
    pages = with_pages(options.metrics, pages_of(urls, contact))
    try:
        async with asyncio.TaskGroup() as group:
            preflights = [
                group.create_task(preflight(server, contact=contact, ignore_eos=options.ignore_eos, say=say))
                for server in served
            ]
            tokenizer = group.create_task(_tokenizer(options, served[0], contact, stack))
            version = group.create_task(engine_version(urls[0], contact))
            metrics = group.create_task(found_pages(pages, pages_access(options), options.scrape_timeout))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    refused = {
        field: refusal(server.url, field, said)
        for server, tried in zip(served, preflights, strict=True)
        for field, said in tried.result().items()
    }
    return version.result(), metrics.result(), tokenizer.result(), refused


def _shortage(options: RunOptions) -> str | None:
    """Return a warning if an open loop may exhaust open files or ports, else None. A closed loop that will exhaust them
    raises ConfigurationError.
    """
    if options.ray is not None:  # each node states its own
        return None
    workers, targets = options.worker_count, len(options.url)
    if options.closed_loop and options.concurrency is not None:
        shortfall = shortage(options.concurrency, workers=workers, targets=targets)
        if shortfall is not None:
            raise ConfigurationError("load.files-or-ports", f"--concurrency {options.concurrency}: {shortfall}")
        return None
    return outlasting(options.pace.most_per_s, workers=workers, targets=targets)


async def _tokenizer(
    options: RunOptions, served: TargetInfo, contact: Contact, stack: AsyncExitStack
) -> tuple[FittingTokenizer, str | None]:
    """Return the declared tokenizer, and the reason if the server's is missing. The reason is None where the server's
    was not wanted.

    The stack closes the server's.
    """
    tokenizer, unused = await _chosen_tokenizer(options.tokenizer, served, contact)
    if isinstance(tokenizer, ServerTokenizer):
        await stack.enter_async_context(tokenizer)
    if options.exact_tokens and PROTOCOLS[contact.endpoint].templated and not tokenizer.template:
        why = f" ({tokenizer.why_no_template})" if isinstance(tokenizer, LocalTokenizer) else ""
        raise ConfigurationError(
            "tokenizer.no-chat-template",
            f"--exact-tokens: {tokenizer.name} does not count a chat template{why}; choose a --tokenizer that does (a "
            "server with /tokenize, or the model's tokenizer.json), or load --endpoint completions",
        )
    return tokenizer, unused


async def _chosen_tokenizer(name: str, served: TargetInfo, contact: Contact) -> tuple[FittingTokenizer, str | None]:
    if name == "cl100k_base":
        return await _reference(), None
    if name not in {"auto", "server"}:
        try:
            return LocalTokenizer(Path(name)), None
        except TokenizerError as error:
            raise ConfigurationError(error.code, named("--tokenizer", name, str(error))) from error
    tls = None if contact.tls == Tls() else tls_context(contact.tls)
    probed = await probe_server(served.url, served.model, contact.headers, tls=tls)
    if isinstance(probed, ServerTokenizer):
        return probed, None
    if name == "server":
        raise ConfigurationError("tokenizer.server", f"--tokenizer server: {probed}; use --tokenizer cl100k_base")
    return await _reference(), probed


async def _reference() -> ReferenceTokenizer:
    return await asyncio.to_thread(ReferenceTokenizer)  # 0.1 s, in which the sockets go on
