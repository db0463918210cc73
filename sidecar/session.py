"""A session: what is found out first, which processes it starts, and how its run directory is opened and closed.

The conductor times nothing: load workers and the scraper stamp and append; it starts them, watches, and reads what they
wrote.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from exporter.metrics_server import serving
from exporter.prometheus import LivePage
from loadgen.protocols import PROTOCOLS
from scraper.access import Access
from scraper.target import STALE_TICKS
from sidecar import manifest as manifests
from sidecar import run as run_directory
from sidecar.access import metrics_access
from sidecar.clock import Clock, anchor
from sidecar.config import as_recorded, listen_address
from sidecar.errors import CannotWrite, ConfigurationError, Interrupted, SidelightError
from sidecar.live import LiveRun
from sidecar.load import load
from sidecar.load_options import RunOptions
from sidecar.options import ScrapeOptions
from sidecar.phases import Session, note, record, settle, unless_stopped, unless_stopped_for, watching
from sidecar.prepare import Prepared, pages_access, prepare_scrape, prepared
from sidecar.processes import Child
from sidecar.progress import Progress
from sidecar.target import reason_of

START_TIMEOUT_S = 30.0
DEFAULT_LISTEN = "127.0.0.1:9464"


async def run(options: RunOptions, *, command: Sequence[str], progress: Progress) -> Path:
    """Load and scrape a target. Returns the run directory; its manifest says how the run ended.

    Raises SidelightError before anything is recorded (bad target, unusable directory), and when one of our own
    processes died (the manifest then says `crashed`, and why).
    """
    async with AsyncExitStack() as stack:
        stop = await stack.enter_async_context(stop_on_signals())
        run_directory.require_free(options.out)
        clock = anchor()
        names = {f"load worker {number}": "loadgen.worker" for number in range(options.worker_count)}
        *workers, scraper = await _started(stack, {**names, "scraper": "scraper.worker"})
        found = await unless_stopped(stop, stack.enter_async_context(prepared(options, progress=progress)))
        page = await _serve(stack, options.listen, progress)
        run_id = manifests.new_run_id()
        path = run_directory.create(options.out or Path("runs") / run_id)
        config = as_recorded(replace(options, model=found.target.model, out=path))
        about = manifests.begin(run_id, config=config, command=command, clock=clock, about=found.about)
        await stack.enter_async_context(_recorded(path, about, clock, stop))
        _tell(found.notes, path, clock, progress)
        stale_s = STALE_TICKS * options.scrape_interval
        live = stack.enter_context(
            LiveRun(
                path, run_id=run_id, clock=clock, planned_s=options.duration, stale_s=stale_s, protocol=options.endpoint
            )
        )
        for number, worker in enumerate(workers):
            spec = worker_spec(number, path, run_id, found, options, clock)
            await worker.begin(spec, stderr=path / run_directory.RAW / f"worker-{number}.stderr")
        if found.targets:
            spec = scraper_spec(path, found.targets, options, clock, pages_access(options))
            await scraper.begin(spec, stderr=path / run_directory.RAW / "scraper.stderr")
        session = Session(
            path=path,
            clock=clock,
            progress=progress,
            stop=stop,
            workers=tuple(workers),
            drain_s=options.drain_timeout,
            scraper=scraper if found.targets else None,
            live=live,
            page=page,
        )
        await load(session, options, found)
    return path


async def scrape(options: ScrapeOptions, *, command: Sequence[str], progress: Progress) -> Path:
    """Scrape targets without any load, for a duration or until a signal. Returns the run directory."""
    async with stop_on_signals() as stop:
        run_directory.require_free(options.out)
        clock = anchor()
        found = await unless_stopped(stop, prepare_scrape(options))
        run_id = manifests.new_run_id()
        path = run_directory.create(options.out or Path("runs") / run_id)
        config = as_recorded(replace(options, out=path))
        started = manifests.begin(run_id, config=config, command=command, clock=clock, about=found.about)
        # Ctrl-C is how a scrape without a duration is meant to end.
        awaited = stop if options.duration is not None else asyncio.Event()
        async with _recorded(path, started, clock, awaited), AsyncExitStack() as stack:
            _tell(found.notes, path, clock, progress)
            (scraper,) = await _started(stack, {"scraper": "scraper.worker"})
            spec = scraper_spec(path, found.targets, options, clock, metrics_access(options))
            await scraper.begin(spec, stderr=path / run_directory.RAW / "scraper.stderr")
            await scraper.expect("ready", timeout_s=START_TIMEOUT_S)
            stale_s = STALE_TICKS * options.scrape_interval
            live = stack.enter_context(
                LiveRun(path, run_id=run_id, clock=clock, planned_s=options.duration, stale_s=stale_s, loaded=False)
            )
            await stack.enter_async_context(watching(live, progress, None))
            live.enter("measure")
            record(path, clock, "phase_start", phase="measure")
            if options.duration is None:
                await stop.wait()
            else:
                await unless_stopped_for(stop, options.duration)
            record(path, clock, "phase_end", phase="measure")
            await settle(scraper, path, clock, seconds=options.scrape_interval)
    return path


def _tell(notes: Sequence[str], path: Path, clock: Clock, progress: Progress) -> None:
    for text in notes:
        progress.warn(text)
        note(path, clock, text)


async def _started(stack: AsyncExitStack, names: Mapping[str, str]) -> tuple[Child, ...]:
    """Start children, by name and module, that are told later what to do; the stack ends them."""
    return tuple([await stack.enter_async_context(Child(name, [module])) for name, module in names.items()])


def worker_spec(
    number: int, path: Path, run_id: str, found: Prepared, options: RunOptions, clock: Clock
) -> dict[str, Any]:
    """Return what a load worker is told: `loadgen.link.WorkerSpec` as JSON."""
    return {
        "worker": number,
        "workers": options.worker_count,
        "run_id": run_id,
        "clock_offset_ns": clock.offset_ns,
        "urls": [one.url for one in found.served],
        "headers": dict(found.contact.headers),
        "tls": msgspec.structs.asdict(found.contact.tls),
        "transport": PROTOCOLS[options.endpoint].transport,
        "protocol": options.endpoint,
        "reuse": options.reuse,
        "sessions": True,
        "out": str(path / run_directory.RAW / f"requests-{number}.log"),
        "request_timeout_s": options.request_timeout,
    }


def scraper_spec(
    path: Path,
    targets: Sequence[str],
    options: RunOptions | ScrapeOptions,
    clock: Clock,
    access: Access,
) -> dict[str, Any]:
    """Return what the scraper is told: `scraper.worker.Spec` as JSON. A scrape without load has no seed of its own."""
    return {
        "targets": list(targets),
        "interval_s": options.scrape_interval,
        "timeout_s": options.scrape_timeout,
        "clock_offset_ns": clock.offset_ns,
        "out": str(path / run_directory.RAW / "scrapes-0.log"),
        "access": asdict(access),
        "seed": options.seed if isinstance(options, RunOptions) else 0,
        "hardware_out": str(path / run_directory.RAW / "hardware.log"),
    }


async def _serve(stack: AsyncExitStack, listen: str | None, progress: Progress) -> LivePage | None:
    address = listen_address(listen or DEFAULT_LISTEN)
    if address is None:
        return None
    host, port = address
    page = LivePage()
    try:
        url = await stack.enter_async_context(serving(page, host, port))
    except OSError as error:
        if listen is not None or error.errno != errno.EADDRINUSE:
            raise ConfigurationError(f"--listen {listen}: {reason_of(error)}; choose another port, or 0") from error
        url = await stack.enter_async_context(serving(page, host, 0))
        progress.warn(f"port {port} is taken, so the live Prometheus page is at {url}")
    progress.stage(f"live Prometheus page: {url}")
    return page


@asynccontextmanager
async def _recorded(path: Path, about: dict[str, Any], clock: Clock, stop: asyncio.Event) -> AsyncIterator[None]:
    """Write the manifest at the start and again at the end, with how it ended."""
    name = path / run_directory.MANIFEST
    run_directory.write_json(name, about)
    try:
        yield
    except Interrupted:
        pass
    except (SidelightError, OSError) as error:
        failed = (
            error if isinstance(error, SidelightError) else CannotWrite(f"{error.filename or path}: {error.strerror}")
        )
        failed.run_directory = path
        # On a full disk even this may fail; the run then reads as crashed without a reason.
        with suppress(CannotWrite):
            run_directory.write_json(name, manifests.end(about, status="crashed", clock=clock, reason=str(failed)))
        raise failed from error
    status = "interrupted" if stop.is_set() else "complete"
    run_directory.write_json(name, manifests.end(about, status=status, clock=clock))


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """Set an event at the first signal to end (SIGHUP: the terminal is gone); a second one is not waited for."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def arrived() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, arrived)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
