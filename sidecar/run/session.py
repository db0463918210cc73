"""A session: its preparation, its processes, and the opening and closing of its run directory.

The conductor times nothing: load workers, the scraper and the receiver of spans stamp and append; it starts them,
watches, and reads what they wrote.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import msgspec

from loadgen.protocols.table import PROTOCOLS
from recorded import directory as run_directory
from recorded import events as run_events
from recorded.errors import ConfigurationError, WorkerDied
from recorded.run import Run
from rundir.access import Access, Guard, masked
from rundir.child import ChildSpec
from rundir.clock import AnchoredClock, anchor
from sidecar.options.access import guard_of, metrics_access
from sidecar.options.fields import listen_address
from sidecar.options.load import RunOptions
from sidecar.options.spans import receiver_spec, require_ports
from sidecar.options.watch import ScrapeOptions
from sidecar.progress.reporter import Progress
from sidecar.run import manifest as manifests
from sidecar.run.phases import (
    Session,
    record,
    record_if_possible,
    settle,
    stop_on_signals,
    unless_stopped,
    unless_stopped_for,
    until_deadline,
    warn_and_record,
    watching,
)
from sidecar.run.processes import RECEIVER, SCRAPER, START_TIMEOUT_S, Child, Supervised

if TYPE_CHECKING:
    from correlator.breakdown import Parts
    from exporter.prometheus.page import LivePage
    from exporter.prometheus.snapshot import Snapshot
    from exporter.summary.result import Summary
    from loadgen.transports.transport import WorkerSpec
    from scraper.commands import SpanSpec, Spec
    from scraper.spans.spec import ReceiverSpec
    from sidecar.live.view import LiveRun
    from sidecar.run.prepare import Prepared

T = TypeVar("T")

if TYPE_CHECKING:
    # Returns what becomes of the run, the parts of its requests, and its summary.
    Finish = Callable[[Run], tuple[T, Parts, Summary]]

DEFAULT_LISTEN = "127.0.0.1:9464"
SPANS = "spans-{}.log"  # by how many receivers died before


async def run(
    options: RunOptions,
    *,
    command: Sequence[str],
    progress: Progress,
    finish: Finish[T],
    linger_s: float | None = None,
) -> T:
    """Load and scrape a target, and return the result of `finish`. `finish` gets the run, which was read as it went and
    has the status in its manifest; beside its result it returns the parts of its requests and its summary, which the
    live page shows until it has been scraped, `linger_s` at most (None: as long as scrapes so far were apart).

    Raises SidelightError before anything is recorded (bad target, unusable directory), and when one of our own
    processes died (the manifest then says `crashed`, and why).
    """
    async with AsyncExitStack() as serving:
        with ExitStack() as reading:
            live, page = await _run(options, reading, serving, command=command, progress=progress)
            run = live.logs.run()
            result, parts, summary = finish(run)
        if page is not None and page.latest is not None:
            from sidecar.live.final import final, final_event, linger  # noqa: PLC0415  what a run need not wait for

            page.stream.end(cache(lambda: final_event(run, parts, summary)))
            await linger(page, final(page.latest, run, parts, summary), linger_s)
        return result


async def _run(
    options: RunOptions, reading: ExitStack, serving: AsyncExitStack, *, command: Sequence[str], progress: Progress
) -> tuple[LiveRun, LivePage | None]:
    """Load and scrape a target to the end of all processes; return the reader of its logs, which `reading` closes, and
    the live page, which `serving` ends.
    """
    async with AsyncExitStack() as stack:
        begun_s = asyncio.get_running_loop().time()
        stop = await stack.enter_async_context(stop_on_signals())
        run_directory.require_free(options.out)
        require_ports(options)
        clock = anchor()
        children = await stack.enter_async_context(AsyncExitStack())
        workers = [
            await children.enter_async_context(Child(f"load worker {number}", ["loadgen.worker"]))
            for number in range(options.worker_count)
        ]
        spans = receiver_spec(options, clock)
        receiver = None if spans is None else await children.enter_async_context(Child("receiver", RECEIVER))
        scraper = await children.enter_async_context(Child("scraper", SCRAPER))
        # Ours are imported while theirs are.
        from sidecar.run.load import load  # noqa: PLC0415
        from sidecar.run.prepare import pages_access, prepare  # noqa: PLC0415

        async with until_deadline(begun_s, options.deadline):
            prepared = await unless_stopped(stop, stack.enter_async_context(prepare(options, progress=progress)))
        page = await _serve(serving, options.listen, guard_of(options), progress)
        model = prepared.target.model
        recorded = manifests.recorded(options, options.out, command, clock, stop, about=prepared.about, model=model)
        run_id, path = await stack.enter_async_context(recorded)
        # They end before the manifest is closed, which states the ends of their logs.
        await stack.enter_async_context(children.pop_all())
        live = reading.enter_context(_live(options, path, run_id, clock, prepared, page))
        plans = stack.enter_context(TemporaryDirectory(prefix="sidelight-")) if options.redact_bodies else None
        session = Session(
            run_id=run_id,
            path=path,
            clock=clock,
            progress=progress,
            stop=stop,
            live=live,
            plans=None if plans is None else Path(plans),
            workers=tuple(workers),
            drain_s=options.drain_timeout,
            page=page,
        )
        for text in filter(None, (*prepared.notes, run_directory.scarce(path))):
            warn_and_record(session, text)
        for number, worker in enumerate(workers):
            work = worker_spec(number, path, run_id, prepared, options, clock)
            await worker.begin(work, stderr=path / run_directory.RAW / f"worker-{number}.stderr")
        if prepared.targets or options.otlp_listen is not None:
            spec = scraper_spec(path, prepared.targets, options, clock, pages_access(options))
            session = await _scraping(session, stack, scraper, spec)
        if receiver is not None and spans is not None:
            session = await _receiving(session, stack, receiver, span_spec(path, spans))
        async with _sending(session, options):
            await load(session, options, prepared, begun_s=begun_s)
    return live, page


@asynccontextmanager
async def _sending(session: Session, options: RunOptions) -> AsyncIterator[None]:
    """Send the live page to the server of --prometheus-write while the context is open; record how far it came."""
    url = options.prometheus_write
    if url is None:
        yield
        return
    from sidecar.live.sending import sending  # noqa: PLC0415  as in run

    def sends(until_ns: int) -> None:
        record_if_possible(session, run_events.WRITING, url=masked(url), until_ns=until_ns)

    def taken(until_ns: int, samples: int, lost: int) -> None:
        how_far = {"until_ns": until_ns, "samples": samples, "lost": lost}
        record_if_possible(session, run_events.WRITTEN, url=masked(url), **how_far)

    @session.live.failures.guard()
    def snapshot() -> tuple[int, Snapshot] | None:
        return session.clock.now_ns(), session.live.snapshot()

    async with sending(url, options, snapshot, progress=session.progress, on_sending=sends, on_taken=taken):
        yield


def _live(
    options: RunOptions, path: Path, run_id: str, clock: AnchoredClock, prepared: Prepared, page: LivePage | None
) -> LiveRun:
    """Return the reader of a run's logs."""
    from loadgen.requests.slo.objectives import parse_slo  # noqa: PLC0415  as in run
    from scraper.targets.target import STALE_TICKS  # noqa: PLC0415  as in run
    from sidecar.live.view import Described, LiveRun  # noqa: PLC0415  as in run

    model = prepared.target.model
    return LiveRun(
        path,
        run_id=run_id,
        clock=clock,
        planned_s=None if options.requests else options.duration,
        stale_s=STALE_TICKS * options.scrape_interval,
        protocol=options.endpoint,
        described=Described(
            about={"model": model, "workload": str(options.workload or ""), "url": masked(options.url[0])},
            planned_requests=options.requests if options.closed_loop else None,
            engine_version=prepared.about["target"]["version"] or "",
            slo=parse_slo(options.slo) if options.slo else None,
            tags=options.tags,
            trace_url=options.trace_url or "",
        ),
        stream=None if page is None else page.stream,
    )


async def scrape(options: ScrapeOptions, *, command: Sequence[str], progress: Progress, finish: Finish[T]) -> T:
    """Scrape targets without any load, and return the result of `finish`. It lasts for a duration or until a signal."""
    with ExitStack() as reading:
        result, *_ = finish((await _scrape(options, reading, command=command, progress=progress)).logs.run())
        return result


async def _scrape(options: ScrapeOptions, reading: ExitStack, *, command: Sequence[str], progress: Progress) -> LiveRun:
    """Scrape to the end of the scraper; return the reader of its logs, which `reading` closes."""
    from scraper.targets.target import STALE_TICKS  # noqa: PLC0415  as in run
    from sidecar.live.view import LiveRun  # noqa: PLC0415
    from sidecar.run.prepare import prepare_scrape  # noqa: PLC0415

    async with stop_on_signals() as stop:
        run_directory.require_free(options.out)
        require_ports(options)
        clock = anchor()
        prepared = await unless_stopped(stop, prepare_scrape(options))
        # Ctrl-C is how a scrape without a duration is meant to end.
        awaited = stop if options.duration is not None else asyncio.Event()
        recorded = manifests.recorded(options, options.out, command, clock, awaited, about=prepared.about)
        async with recorded as (run_id, path), AsyncExitStack() as stack:
            stale_s = STALE_TICKS * options.scrape_interval
            live = reading.enter_context(
                LiveRun(path, run_id=run_id, clock=clock, planned_s=options.duration, stale_s=stale_s, loaded=False)
            )
            session = Session(run_id=run_id, path=path, clock=clock, progress=progress, stop=stop, live=live)
            for text in filter(None, (*prepared.notes, run_directory.scarce(path))):
                warn_and_record(session, text)
            scraper = await stack.enter_async_context(Child("scraper", SCRAPER))
            spec = scraper_spec(path, prepared.targets, options, clock, metrics_access(options))
            session = await _scraping(session, stack, scraper, spec)
            if (spans := receiver_spec(options, clock)) is not None:
                receiver = await stack.enter_async_context(Child("receiver", RECEIVER))
                session = await _receiving(session, stack, receiver, span_spec(path, spans))
            await asyncio.gather(*(each.ready() for each in session.supervised))
            await stack.enter_async_context(watching(session))
            live.enter("measure")
            record(session, "phase_start", phase="measure")
            await unless_stopped_for(stop, options.duration)
            record(session, "phase_end", phase="measure")
            await settle(session, options.scrape_interval, listening=session.listening)
    return live


async def _scraping(session: Session, stack: AsyncExitStack, child: Child, spec: Spec) -> Session:
    """Start the scraper; return the session with it."""
    events = run_events.SCRAPER_DIED, run_events.SCRAPER_RESTARTED
    supervised = await _supervised(session, stack, child, lambda deaths: spec_after(spec, deaths), *events)
    return replace(session, scraper=supervised)


async def _receiving(session: Session, stack: AsyncExitStack, child: Child, spec: SpanSpec) -> Session:
    """Start the receiver of spans; return the session with it, and with where it listens."""
    addresses = spec.receiver.grpc, spec.receiver.http
    events = run_events.RECEIVER_DIED, run_events.RECEIVER_RESTARTED
    supervised = await _supervised(
        session, stack, child, lambda deaths: span_spec_after(spec, deaths, *addresses), *events
    )
    if addresses[0].endswith(":0"):  # only then is it worth waiting for what grpcio's import takes
        ports = await child.expect("listening", timeout_s=START_TIMEOUT_S)
        host = addresses[0].rpartition(":")[0]
        addresses = f"{host}:{ports['grpc_port']}", f"{host}:{ports['http_port']}"
    session.progress.stage(f"spans are received at http://{addresses[0]} (gRPC) and http://{addresses[1]}/v1/traces")
    return replace(session, receiver=supervised, listening=addresses[0])


async def _supervised(
    session: Session,
    stack: AsyncExitStack,
    child: Child,
    spec: Callable[[int], ChildSpec],
    died: str,
    restarted: str,
) -> Supervised:
    """Start a child that is restarted where it dies. `spec` returns its specification by the number of deaths.

    `died` and `restarted` are the events that are recorded then.
    """
    stderr = session.path / run_directory.RAW / f"{child.name}.stderr"
    await child.begin(spec(0), stderr=stderr)

    async def begin(again: Child) -> None:
        await again.begin(spec(supervised.deaths), stderr=stderr)

    def on_death(death: WorkerDied) -> None:
        record_if_possible(session, died, reason=str(death))
        session.progress.warn(f"{death}; it is started again")

    def on_restart() -> None:
        record_if_possible(session, restarted)
        session.progress.stage(f"the {child.name} runs again")

    supervised = Supervised(child, begin=begin, died=on_death, restarted=on_restart)
    return await stack.enter_async_context(supervised)


def worker_spec(
    number: int, path: Path, run_id: str, prepared: Prepared, options: RunOptions, clock: AnchoredClock
) -> WorkerSpec:
    """Return the specification of a load worker."""
    from loadgen.transports.transport import WorkerSpec  # noqa: PLC0415  as in run

    return WorkerSpec(
        worker=number,
        workers=options.worker_count,
        run_id=run_id,
        clock_offset_ns=clock.offset_ns,
        urls=[served.url for served in prepared.served],
        headers=dict(prepared.contact.headers),
        header_sets=tuple(map(dict, prepared.load.header_sets)),
        tls=prepared.contact.tls,
        transport=PROTOCOLS[options.endpoint].transport,
        protocol=options.endpoint,
        reuse=options.reuse,
        sessions=True,
        stand_ins=prepared.stand_ins,
        redact_bodies=options.redact_bodies,
        out=str(path / run_directory.RAW / f"requests-{number}.log"),
        request_timeout_s=options.request_timeout,
    )


def scraper_spec(
    path: Path,
    targets: Sequence[str],
    options: RunOptions | ScrapeOptions,
    clock: AnchoredClock,
    access: Access,
) -> Spec:
    """Return the specification of the scraper. A scrape without load has no seed of its own."""
    from scraper.commands import Spec  # noqa: PLC0415  as in run

    spec = Spec(
        targets=list(targets),
        interval_s=options.scrape_interval,
        timeout_s=options.scrape_timeout,
        clock_offset_ns=clock.offset_ns,
        access=access,
        seed=options.seed if isinstance(options, RunOptions) else 0,
        out=str(path / run_directory.RAW / run_directory.SCRAPES.format(0)),
    )
    return spec_after(spec, 0)


def spec_after(spec: Spec, deaths: int) -> Spec:
    """Return the specification of a scraper after `deaths` others died: logs of its own."""
    raw = Path(spec.out).parent
    return msgspec.structs.replace(
        spec,
        out=str(raw / run_directory.SCRAPES.format(deaths)),
        hardware_out=str(raw / (f"hardware-{deaths}.log" if deaths else "hardware.log")),
        timings_out=str(raw / f"timings-{deaths}.log"),
    )


def span_spec(path: Path, receiver: ReceiverSpec) -> SpanSpec:
    """Return the specification of the process that receives spans."""
    from scraper.commands import SpanSpec  # noqa: PLC0415  as in run

    return SpanSpec(receiver=receiver, out=str(path / run_directory.RAW / SPANS.format(0)))


def span_spec_after(spec: SpanSpec, deaths: int, grpc: str, http: str) -> SpanSpec:
    """Return the specification of a receiver after `deaths` others died. It has a log of its own, and the addresses at
    which spans were received before, where free ports were asked for.
    """
    receiver = msgspec.structs.replace(spec.receiver, grpc=grpc, http=http)
    return msgspec.structs.replace(spec, receiver=receiver, out=str(Path(spec.out).with_name(SPANS.format(deaths))))


async def _serve(stack: AsyncExitStack, listen: str | None, guard: Guard, progress: Progress) -> LivePage | None:
    address = listen_address(listen or DEFAULT_LISTEN)
    if address is None:
        return None
    from exporter.prometheus.page import LivePage  # noqa: PLC0415
    from exporter.prometheus.server import serving  # noqa: PLC0415  as in run
    from sidecar.run.target import reason_of  # noqa: PLC0415

    host, port = address
    page = LivePage()
    try:
        url = await stack.enter_async_context(serving(page, host, port, guard=guard))
    except OSError as error:
        if listen is not None or error.errno != errno.EADDRINUSE:
            raise ConfigurationError(f"--listen {listen}: {reason_of(error)}; choose another port, or 0") from error
        url = await stack.enter_async_context(serving(page, host, 0, guard=guard))
        progress.warn(f"port {port} is taken, so the live page is at {url}")
    progress.stage(f"live page: {url.removesuffix('metrics')} (for Prometheus: {url})")
    return page
