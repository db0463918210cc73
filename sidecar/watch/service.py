"""A resident sidecar: spans and pages come in without load, and the breakdown is served. Requests are broken down as
they end.

The receiver and the scraper are processes of their own, as in a run. A directory of it reads as that of a run does.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from sidelight.exporter.html.live import event
from sidelight.exporter.prometheus.page import LivePage
from sidelight.recorded import directory as run_directory
from sidelight.recorded import events as run_events
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.child import first_cause
from sidelight.rundir.clock import anchor, time_of_day_ns
from sidelight.rundir.process import collecting_often, raise_limit
from sidelight.sidecar.live.sending import Browsers
from sidelight.sidecar.options.spans import require_ports
from sidelight.sidecar.options.watch import WatchOptions, pages_of, reloaded
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import manifest as manifests
from sidelight.sidecar.run.phases import record, record_if_possible
from sidelight.sidecar.watch.objectives import watched
from sidelight.sidecar.watch.page import draw_on, estimate_twin_on, look, look_on, sending, served, summary_line
from sidelight.sidecar.watch.processes import (
    Scraper,
    Watch,
    WatchReceiver,
    end_at_clock_step,
    keep_receiver_up,
    keep_scraper_up,
    scraped_line,
)
from sidelight.sidecar.watch.targets import follow_targets, scrape_other
from sidelight.sidecar.watch.view import WatchView

SLICE_S = 10.0  # of what `report` makes of the logs
HALTED_S = 10.0  # without a look at the logs: a defect, of which a supervisor is to know
# What is reported on at the end: some 15,000 requests of three spans, which take 4 s. Who ends a service waits 10 s.
SPAN_BYTES_AT_END = 4_000_000
BROWSERS_S = 1.0  # in which a browser takes the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A directory of the watch that has ended. `line` is its result.

    `moved_ns` is by how much the wall clock was set, which ended it; 0: the watch was stopped. The next one takes over
    `options`, and the ports of the page and of spans.
    """

    line: str
    path: Path
    moved_ns: int
    options: WatchOptions
    page_port: int
    ports: tuple[int, int] | None


async def watch(
    options: WatchOptions,
    *,
    command: Sequence[str],
    progress: Progress,
    wall_ns: Callable[[], int] = time_of_day_ns,
) -> tuple[str, Path]:
    """Watch until SIGTERM or SIGINT. SIGHUP reads --config again. Returns the last directory and its result in a line.

    When the wall clock is set, the watch goes on in another directory, so that all stamps of one are of one clock.
    Raises SidelightError before anything is recorded (an address in use, an unusable directory), and where the first
    receiver cannot be started.
    """
    raise_limit()
    asked, stop, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
    with _signals(asked, stop, reload):
        ended = await _watch(options, command, progress, wall_ns, stop, reload, None)
        while ended.moved_ns and not asked.is_set():
            progress.stage(f"{ended.line}; `sidelight report {ended.path}` derives its report")
            stop.clear()
            ended = await _watch(ended.options, command, progress, wall_ns, stop, reload, ended)
    return ended.line, ended.path


async def _watch(
    options: WatchOptions,
    command: Sequence[str],
    progress: Progress,
    wall_ns: Callable[[], int],
    stop: asyncio.Event,
    reload: asyncio.Event,
    before: _Ended | None,
) -> _Ended:
    """Watch into one directory, which follows that of `before`."""
    out = options.out if before is None else _following(options.out)
    run_directory.require_free(out)
    require_ports(options)
    pages = await asyncio.to_thread(pages_of, options)
    new_view = await asyncio.to_thread(_new_view, options)
    clock = anchor(wall_ns)
    page = LivePage()
    async with AsyncExitStack() as stack:
        shared: Watch | None = None
        port = before.page_port if before else None
        url = await served(stack, options, port, page, lambda: _unready(shared), lambda: _unhealthy(shared))
        recorded = manifests.recorded(
            options, out, command, clock, asyncio.Event(), about=_about(pages), slice_duration=SLICE_S
        )
        run_id, path = await stack.enter_async_context(recorded)
        browsers = Browsers(page.stream, f"Sidelight watch {run_id}", run_id=run_id)
        browsers.begin(clock.now_ns(), is_by_clock=True)
        shared = Watch(
            path=path,
            clock=clock,
            options=options,
            pages=pages,
            progress=progress,
            view=stack.enter_context(new_view(path / run_directory.RAW, run_id=run_id, pages=pages, browsers=browsers)),
            page=page,
            browsers=browsers,
            begun_ns=clock.now_ns(),
            receiver=WatchReceiver(lives=1, ports=before.ports, clock_step_ns=before.moved_ns)
            if before
            else WatchReceiver(),
            scraper=Scraper(lives=1 if before else 0),
            stop=stop,
            reload=reload,
        )
        progress.stage(f"live page: {url.removesuffix('metrics')}")
        progress.stage(f"{url}, /healthz and /readyz beside it; logs in {path}")
        _begin_recording(shared)
        stack.enter_context(collecting_often())
        async with sending(shared):
            await _until_stopped(shared, command, wall_ns)
            await _end_recording(shared)
        elapsed_s = (shared.clock.now_ns() - shared.begun_ns) / 1e9
        return _Ended(
            line=summary_line(shared.view, elapsed_s=elapsed_s, restarts=shared.receiver.restarts),
            path=path,
            moved_ns=shared.moved_ns,
            options=shared.options,
            page_port=urlsplit(url).port or 0,
            ports=shared.receiver.ports,
        )


def _new_view(options: WatchOptions) -> Callable[..., WatchView]:
    """Return a maker of the view; raises ConfigurationError for options that say nothing, before all else."""
    objectives, twin = watched(options.slo, options.known, options.baseline)
    return partial(WatchView, shard=options.shard, objectives=objectives, twin=twin)


def _following(out: Path | None) -> Path | None:
    """Return the directory that follows --out: OUT-2, or the first after it that is free."""
    if out is None:
        return None
    return next(path for number in count(2) if not (path := Path(f"{out}-{number}")).exists())


def _about(pages: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    return {"metrics_targets": [{"configured": masked(url), "url": masked(url)} for url in pages]}


def _unready(shared: Watch | None) -> str:
    """Return the answer of /readyz; empty when the watch is ready."""
    return "starting" if shared is None else next(filter(None, shared.not_ready.values()), "")


def _begin_recording(shared: Watch) -> None:
    if text := run_directory.scarce(shared.path):
        shared.warn_and_record(text)
    record(shared, "phase_start", phase="measure")


async def _end_recording(shared: Watch) -> None:
    """Count the requests that are left, and give browsers the last event."""
    shared.progress.close()
    shared.record_rest()
    record_if_possible(shared, "phase_end", phase="measure")
    shared.record_estimates()
    await asyncio.to_thread(look, shared, all_of_it=True)
    with shared.view.failures.guard():
        shared.page.stream.publish(shared.browsers.rows(), b"")
    note = f"The watch has ended. Its report is in {shared.path}."
    if shared.moved_ns:
        note = "The clock was set, and the watch goes on in another directory: reload this page."
    shared.page.stream.end(lambda: event("final", {"note": note}))
    await shared.page.stream.until_left(BROWSERS_S)
    record_if_possible(shared, run_events.WATCHED, **shared.view.since_start(restarts=shared.receiver.restarts))


def _unhealthy(shared: Watch | None) -> str:
    """Return the answer of /healthz, empty while the watch is healthy. It is empty while the logs are looked at, before
    that, and at the end.
    """
    silent_s = 0.0 if shared is None else time.monotonic() - shared.looked_s
    if shared is None or silent_s < HALTED_S or shared.stop.is_set():
        return ""
    return f"the logs have not been looked at for {silent_s:.0f} s"


@contextmanager
def _signals(asked: asyncio.Event, stop: asyncio.Event, reload: asyncio.Event) -> Iterator[None]:
    """End the watch at SIGTERM and SIGINT; read the configuration file again at SIGHUP."""

    def end() -> None:
        asked.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _until_stopped(shared: Watch, command: Sequence[str], wall_ns: Callable[[], int]) -> None:
    """Receive, scrape, look and reload; then end the processes, which write what they have in hand."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(keep_receiver_up(shared)),
                group.create_task(keep_scraper_up(shared)),
                group.create_task(end_at_clock_step(shared, wall_ns)),
                group.create_task(_reload_on(shared, command)),
                group.create_task(follow_targets(shared)),
                group.create_task(estimate_twin_on(shared)),
            ]
            group.create_task(look_on(shared))
            group.create_task(draw_on(shared))
            await shared.stop.wait()
            shared.not_ready["receiver"] = "ending"
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise first_cause(failed) from None


async def _reload_on(shared: Watch, command: Sequence[str]) -> None:
    """Read the configuration file again at each SIGHUP; one that is broken changes nothing."""
    while True:
        await shared.reload.wait()
        shared.reload.clear()
        try:
            options, refused = reloaded(shared.options, command)
            pages = await asyncio.to_thread(pages_of, options)
        except ConfigurationError as error:
            shared.warn_and_record(f"not reloaded, the configuration is unchanged: {error}")
            continue
        for text in refused:
            shared.warn_and_record(f"reload: {text}")
        shared.options = options
        await scrape_other(shared, pages)
        text = f"reloaded: {scraped_line(pages, options)}"
        shared.progress.stage(text)
        record_if_possible(shared, "note", text=text)
