"""The specifications of a run's processes, and their start and restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.recorded import directory as run_directory
from sidelight.recorded import events as run_events
from sidelight.recorded.errors import WorkerDied
from sidelight.rundir.access import Access
from sidelight.rundir.child import ChildSpec
from sidelight.rundir.clock import AnchoredClock
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.spans import receiver_spec
from sidelight.sidecar.options.watch import ScrapeOptions
from sidelight.sidecar.run.phases import Session, record_if_possible, warn_and_record
from sidelight.sidecar.run.processes.child import RECEIVER, SCRAPER, START_TIMEOUT_S, Child
from sidelight.sidecar.run.processes.places import LOCAL, Place
from sidelight.sidecar.run.processes.supervised import Supervised

if TYPE_CHECKING:
    from sidelight.loadgen.transports.transport import WorkerSpec
    from sidelight.scraper.commands import SpanSpec, Spec
    from sidelight.scraper.spans.spec import ReceiverSpec
    from sidelight.sidecar.run.preparation.prepare import Prepared

SPANS = "spans-{}.log"  # by how many receivers died before


async def started(
    processes: AsyncExitStack, options: RunOptions, remote: Sequence[Place], clock: AnchoredClock
) -> tuple[list[Child], Child, Child | None]:
    """Start the processes of a session, which `processes` ends: load workers, scraper, and receiver of spans if any.

    The workers are at the `remote` places, else here.
    """
    workers = [
        await processes.enter_async_context(Child(f"load worker {number}", ["sidelight.loadgen.worker"], place=place))
        for number, place in enumerate(remote or [LOCAL] * options.worker_count)
    ]
    listens = receiver_spec(options, clock) is not None
    receiver = await processes.enter_async_context(Child("receiver", RECEIVER)) if listens else None
    return workers, await processes.enter_async_context(Child("scraper", SCRAPER)), receiver


async def begun(
    session: Session,
    stack: AsyncExitStack,
    options: RunOptions,
    prepared: Prepared,
    *,
    scraper: Child,
    receiver: Child | None,
) -> Session:
    """Give the processes their specifications; return the session with them. `stack` ends their supervision."""
    from sidelight.sidecar.run.preparation.pages import pages_access  # noqa: PLC0415  as in run

    path, clock = session.path, session.clock
    for text in filter(None, (*prepared.notes, run_directory.scarce(path))):
        warn_and_record(session, text)
    for number, worker in enumerate(session.workers):
        work = worker_spec(number, session, prepared, options)
        await worker.begin(work, stderr=path / run_directory.RAW / f"worker-{number}.stderr")
    if prepared.targets or options.otlp_listen is not None:
        spec = scraper_spec(path, prepared.targets, options, clock, pages_access(options))
        session = await scraping(session, stack, scraper, spec)
    spans = receiver_spec(options, clock)
    if receiver is not None and spans is not None:
        session = await receiving(session, stack, receiver, span_spec(path, spans))
    return session


async def scraping(session: Session, stack: AsyncExitStack, child: Child, spec: Spec) -> Session:
    """Start the scraper; return the session with it."""
    events = run_events.SCRAPER_DIED, run_events.SCRAPER_RESTARTED
    supervised = await _supervised(session, stack, child, lambda deaths: spec_after(spec, deaths), *events)
    return replace(session, scraper=supervised)


async def receiving(session: Session, stack: AsyncExitStack, child: Child, spec: SpanSpec) -> Session:
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


def worker_spec(number: int, session: Session, prepared: Prepared, options: RunOptions) -> WorkerSpec:
    """Return the specification of a load worker: its files and clock are those of its place."""
    from sidelight.loadgen.transports.transport import WorkerSpec  # noqa: PLC0415  what a run's start need not wait for

    place = session.workers[number].place
    return WorkerSpec(
        worker=number,
        workers=len(session.workers),
        run_id=session.run_id,
        clock_offset_ns=place.offset_ns(session.clock),
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
        out=place.path_there(session.path / run_directory.RAW / f"requests-{number}.log"),
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
    from sidelight.scraper.commands import Spec  # noqa: PLC0415  what a run's start need not wait for

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
    from sidelight.scraper.commands import SpanSpec  # noqa: PLC0415  what a run's start need not wait for

    return SpanSpec(receiver=receiver, out=str(path / run_directory.RAW / SPANS.format(0)))


def span_spec_after(spec: SpanSpec, deaths: int, grpc: str, http: str) -> SpanSpec:
    """Return the specification of a receiver after `deaths` others died. It has a log of its own, and the addresses at
    which spans were received before, where free ports were asked for.
    """
    receiver = msgspec.structs.replace(spec.receiver, grpc=grpc, http=http)
    return msgspec.structs.replace(spec, receiver=receiver, out=str(Path(spec.out).with_name(SPANS.format(deaths))))
