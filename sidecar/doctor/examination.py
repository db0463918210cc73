"""Examine an endpoint before a run: what answers, its metrics and timings, and how to enable what is missing; and a
gateway before it: what reaches the engine through it, and what its spans can tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console

from sidelight.recorded.errors import SidelightError, TargetUnreachable
from sidelight.rundir.printable.errors import with_code
from sidelight.scraper.targets.fetch import FetchLimits
from sidelight.scraper.targets.scrape import clock_of
from sidelight.sidecar.doctor.delivery import plain_lines
from sidelight.sidecar.doctor.lines import FAIL, HINT, OK, SKIP, WARN, print_line
from sidelight.sidecar.doctor.page import Servers, examine_metrics, examine_timings
from sidelight.sidecar.options.load import DoctorOptions
from sidelight.sidecar.options.spans import SpanOptions, require_ports
from sidelight.sidecar.progress.reporter import Terminal
from sidelight.sidecar.run.preparation.pages import contact_of, pages_access, pages_of, with_pages
from sidelight.sidecar.run.preparation.preflight import FEW_TOKENS, ask, is_streamed, preflight, refusal, without_fields
from sidelight.sidecar.run.preparation.target import (
    MOST_NAMED,
    Contact,
    TargetInfo,
    engine_version,
    probe,
    proxy_note,
    unlisted_note,
)

# Engines by the owner that their lists of models state.
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}
TO_CHANGE, NOT_USABLE = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engines:
    """Targets at the URLs, and their names by lists of models and pages."""

    served: tuple[TargetInfo, ...]
    names: Servers
    usable: bool


async def examine(options: DoctorOptions) -> int:
    """Print the examination of the URLs, their metrics pages and the gateway, and the gaps.

    Returns 0, 1 where something is to be changed for the gateway's part to be known, or 3 where no run is possible.
    """
    console, contact = Terminal(highlight=False), contact_of(options)
    addresses = options.url if options.gateway is None else (*options.url, options.gateway)
    if note := proxy_note(addresses):
        print_line(console, WARN, note)
    # The gateway's key is for its page too.
    at_pages = replace(options, url=addresses)
    if options.otlp_listen is None:
        engines = await _examine_engines(console, options, at_pages, contact)
        return 0 if engines.usable else NOT_USABLE
    from sidelight.sidecar.doctor.passage import examine_passages, receiving  # noqa: PLC0415  they import grpcio

    require_ports(SpanOptions(otlp_listen=options.otlp_listen))
    # Before any request: an exporter that finds no receiver waits longer and longer until it tries again.
    async with receiving(options.otlp_listen, console) as arrivals:
        engines = await _examine_engines(console, options, at_pages, contact)
        gateway = None
        if options.gateway is not None:
            try:
                gateway = await _examine_models(console, options.gateway, options, contact)
            except SidelightError as error:
                print_line(console, FAIL, with_code(error).replace("--url", "--gateway"))
                return NOT_USABLE
        names = engines.names
        if names.engine is None and gateway is not None:
            names = replace(names, engine=OWNERS.get(gateway.owner))
        verdict = await examine_passages(
            console, engines.served, gateway, names, contact, arrivals, wait_s=options.wait
        )
    if not engines.usable or not verdict.usable:
        return NOT_USABLE
    return TO_CHANGE if verdict.to_change else 0


async def _examine_engines(
    console: Console, options: DoctorOptions, at_pages: DoctorOptions, contact: Contact
) -> _Engines:
    """Print the examination of the URLs and the pages."""
    served: list[TargetInfo] = []
    reachable = list(options.url)
    for url in options.url:
        try:
            served.append(await _examine_api(console, url, options, contact))
        except SidelightError as error:
            print_line(console, FAIL, with_code(error))
            if isinstance(error, TargetUnreachable):
                reachable.remove(url)
    owners = [OWNERS[server.owner] for server in served if server.owner in OWNERS]
    names = Servers(engine=owners[-1] if owners else None, version=served[-1].version if served else "")
    access, limits = pages_access(at_pages), FetchLimits(timeout_s=options.scrape_timeout)
    pages = with_pages(options.metrics, pages_of(reachable, contact))
    if not pages:
        why = "not looked for, since nothing answers"
        if not options.url:
            why = "give the addresses of the engine's and the gateway's with --metrics URL"
        elif reachable:
            why = f"none beside --endpoint {contact.endpoint}; give their address with --metrics URL"
        print_line(console, SKIP, f"server metrics: {why}")
    for page in pages:
        if clock_of(page):
            await examine_timings(console, page, access, limits)
        else:
            names = await examine_metrics(console, page, access, limits, names)
    return _Engines(served=tuple(served), names=names, usable=len(served) == len(options.url))


async def _examine_api(console: Console, url: str, options: DoctorOptions, contact: Contact) -> TargetInfo:
    """Print the examination of a URL by the requests that a run would send. Raises SidelightError where a run would."""
    served = await _examine_models(console, url, options, contact)
    if version := await engine_version(served.url, contact):
        print_line(console, OK, f"server version {version}")
        served = replace(served, version=version)
    refused = await preflight(served, contact=contact, ignore_eos=True, say=partial(print_line, console, HINT))
    for field, said in refused.items():
        print_line(console, WARN, refusal(served.url, field, said))
    if note := unlisted_note(served):
        print_line(console, WARN, note)
    streams = "streams" if is_streamed(contact) else "answers, without a stream"
    print_line(console, OK, f"{contact.endpoint} {streams}")
    if is_streamed(contact):
        answer = await ask(served, contact=without_fields(contact, refused), ignore_eos=True, tokens=FEW_TOKENS)
        for mark, text in plain_lines(answer.reply.chunk_ns, answer.exchange.dispatch_ns):
            print_line(console, mark, text)
    return served


async def _examine_models(console: Console, url: str, options: DoctorOptions, contact: Contact) -> TargetInfo:
    """Print the name of the model examined: the given one, else the first.

    Behind a gateway it may have another name: an engine that does not list the one that was named is asked for its own.
    """
    served = await probe(url, model=options.model, contact=contact, any_model=True)
    is_behind = options.gateway is not None and url in options.url
    if is_behind and served.unlisted is not None and served.listed:
        served = await probe(url, model=None, contact=contact, any_model=True)
    limit = "" if served.max_model_len is None else f" (up to {served.max_model_len} tokens)"
    if served.unlisted is None:
        print_line(console, OK, f"{served.url} serves {served.model}{limit}")
    if options.model is None and len(served.listed) > 1:
        names = ", ".join(served.listed[:MOST_NAMED]) + (", ..." if len(served.listed) > MOST_NAMED else "")
        text = f"{len(served.listed)} models are served ({names}), and {served.model} is examined; a run needs --model"
        print_line(console, WARN, text)
    return served
