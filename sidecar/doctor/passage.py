"""One request through a gateway, one to the engine without it, and their spans."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from sidelight.loadgen.records import trace_id
from sidelight.recorded.errors import SidelightError
from sidelight.rundir.clock import anchor
from sidelight.scraper.gateways.catalogue import GatewayEntry, detect_reply
from sidelight.scraper.gateways.catalogue import gateway as gateway_of
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec
from sidelight.sidecar.doctor.delivery import CURE, delivery_lines
from sidelight.sidecar.doctor.gateway import gateway_lines
from sidelight.sidecar.doctor.lines import FAIL, HINT, OK, WARN, Line, print_line
from sidelight.sidecar.doctor.page import Servers
from sidelight.sidecar.doctor.reach import Surroundings, direct_lines, named, request_id_lines, trace_lines
from sidelight.sidecar.doctor.trail import ProbeSpans, Trail, follow
from sidelight.sidecar.options.spans import listen_addresses
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.preparation.preflight import (
    MOST_ATTEMPTS,
    PREFLIGHT,
    ProbeReply,
    ask,
    refusal,
    require_answer,
)
from sidelight.sidecar.run.preparation.target import MOST_NAMED, Contact, TargetInfo, unlisted_note

FEW_TRACES = 100  # that are looked through at each export
TOKENS = 64  # enough pieces to see whether some are held back


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a run through the gateway: is it possible, and is anything to be changed first."""

    usable: bool
    to_change: bool


@asynccontextmanager
async def receiving(listen: str, console: Console) -> AsyncIterator[ProbeSpans]:
    """Receive spans at an address that is free."""
    clock = anchor()
    grpc, http = listen_addresses(listen)
    spec = ReceiverSpec(grpc=grpc, http=http, clock_offset_ns=clock.offset_ns)
    arrivals = ProbeSpans(clock=clock)
    say = partial(print_line, console, WARN)
    async with Receiver(spec, log=None, say=say, deliver=arrivals.take) as receiver:
        arrivals.listen = f"{listen.rpartition(':')[0]}:{receiver.grpc_port}"
        arrivals.listen_http = f"{listen.rpartition(':')[0]}:{receiver.http_port}"
        yield arrivals


async def examine_passages(
    console: Console,
    engines: Sequence[TargetInfo],
    gateway: TargetInfo | None,
    names: Servers,
    contact: Contact,
    arrivals: ProbeSpans,
    *,
    wait_s: float,
) -> Verdict:
    """Print the passage of requests through a gateway, and of the engine's spans without it.

    engines  those that can be asked without it
    names    what is known of them and of the gateway without their spans
    """
    run_id = f"doctor-{secrets.token_hex(8)}"
    send = partial(ask, contact=contact, ignore_eos=True, tokens=TOKENS, clock=arrivals.clock)
    direct = [await send(server, run_id=f"{run_id}-{number}") for number, server in enumerate(engines)]
    through = None if gateway is None else await send(gateway, run_id=run_id)
    is_usable = True
    if gateway is not None and through is not None:
        is_usable = _print_answer(console, through, gateway)
        if through.exchange.status != 200:
            return Verdict(usable=False, to_change=False)
    ours = {trace_id(PREFLIGHT, attempt) for attempt in range(MOST_ATTEMPTS)}
    ours |= {answer.trace_id for answer in (*direct, through) if answer is not None}

    def is_complete() -> bool:
        """Look at our own traces alone where there are many others."""
        alone = {key: arrivals.traces.get(key, ()) for key in map(bytes.fromhex, ours)}
        traces = arrivals.traces if len(arrivals.traces) <= FEW_TRACES else alone
        trails = [follow(answer, traces, ours) for answer in (*direct, through) if answer is not None]
        return all(each.is_complete for each in trails) and (through is None or bool(trails[-1].gateways))

    await _await_spans(arrivals, is_complete, wait_s)
    trail = None if through is None else follow(through, arrivals.traces, ours)
    around = Surroundings(
        engine=names.engine,
        version=names.version,
        gateway=None if through is None or trail is None else _gateway(through, trail, names),
        direct=[follow(answer, arrivals.traces, ours) for answer in direct],
        listen=arrivals.listen,
        listen_http=arrivals.listen_http,
    )
    lines = [line for each in around.direct for line in direct_lines(each, around)]
    if through is not None and trail is not None:
        lines += _through_lines(through, trail, around, direct)
    for mark, text in lines:
        print_line(console, mark, text)
    return Verdict(usable=is_usable, to_change=any(mark == WARN for mark, _ in lines))


def _print_answer(console: Console, answer: ProbeReply, gateway: TargetInfo) -> bool:
    """Print the outcome of a request through the gateway; return whether a run is possible with its reply."""
    for field, said in answer.refused.items():
        print_line(console, WARN, refusal(gateway.url, field, said))
    try:
        require_answer(answer, gateway, ignore_eos=True)
    except SidelightError as error:
        print_line(console, FAIL, str(error).replace("--url", "--gateway"))
        if answer.exchange.status in (400, 404, 422) and "--model" not in str(error):
            hint = f"{gateway.model} may not be the model's name behind the gateway: give it with --model"
            print_line(console, HINT, hint)
        return False
    if note := unlisted_note(gateway):
        print_line(console, WARN, note)
    print_line(console, OK, f"{gateway.url} answered a request for {answer.tokens} tokens, trace {answer.trace_id}")
    return True


def _gateway(answer: ProbeReply, trail: Trail, names: Servers) -> GatewayEntry | None:
    """Return the gateway by its span, its page or its reply, or None."""
    recognised = detect_reply(answer.headers)
    name = next((span.name for span in trail.gateways if span.name), names.gateway)
    name = name or (recognised.name if recognised else None)
    return gateway_of(name) if name else None


def _through_lines(
    answer: ProbeReply, trail: Trail, around: Surroundings, direct: Sequence[ProbeReply]
) -> Iterator[Line]:
    """Yield lines on the request through the gateway."""
    if around.gateway is not None:
        yield OK, f"the gateway is {around.gateway.title}; docs/reference/gateways.md has its settings"
    yield from trace_lines(trail, around)
    yield from request_id_lines(answer, trail)
    yield from gateway_lines(trail, around)
    if len(answer.reply.chunk_ns):
        generated_s = float(trail.parts.decode_s[0])
        chunks_ns = [other.reply.chunk_ns for other in direct]
        yield from delivery_lines(
            answer.reply.chunk_ns,
            direct_ns=max(chunks_ns, key=len, default=None),
            generated_s=generated_s,
            cure=around.setting("delivery", CURE),
        )


async def _await_spans(arrivals: ProbeSpans, is_complete: Callable[[], bool], wait_s: float) -> None:
    """Wait for all expected spans, and report the services that sent some on standard error."""
    progress, begun_s = Progress("lines"), time.monotonic()
    progress.stage(f"waiting for spans, {wait_s:g} s at most: exporters send them every 5 s")
    services: set[str] = set()
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while not is_complete():
                arrivals.news.clear()
                await arrivals.news.wait()
                for service in sorted(arrivals.services - services)[: max(0, MOST_NAMED - len(services))]:
                    progress.stage(f"spans of {named(service)} came after {time.monotonic() - begun_s:.1f} s")
                services |= arrivals.services
