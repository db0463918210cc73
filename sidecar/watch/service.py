"""A resident sidecar: spans and pages come in without any load of ours, and the breakdown is served as requests end.

The receiver and the scraping are a process of their own, as in a run. One that dies is started again, later and later,
and each such death is counted, ports and recorded. A directory of it reads as that of a run does.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from correlator.live.client_spans import FIRST_TOKEN_ATTRIBUTES
from exporter.html.live import LiveColumns, event, state_event
from exporter.prometheus.page import LivePage
from exporter.prometheus.server import serving
from exporter.prometheus.snapshot import Snapshot
from rundir.access import masked
from rundir.clock import Clock, anchor, step_ns, step_text, time_of_day_ns
from rundir.frames import Rotation, next_number
from rundir.process import raise_limit
from scraper.commands import SetTargets, Spec
from scraper.spans.backlog import claimed
from scraper.spans.spec import ForwardKeep
from scraper.targets.target import STALE_TICKS
from sidecar import directory as run_directory
from sidecar.errors import ConfigurationError, WorkerDied
from sidecar.options.access import guard_of, metrics_access
from sidecar.options.fields import listen_address
from sidecar.options.spans import receiver_spec, require_ports
from sidecar.options.watch import WatchOptions, reloaded
from sidecar.progress import Progress
from sidecar.run import manifest as manifests
from sidecar.run.phases import record, record_if_possible, unless_stopped_for
from sidecar.run.processes import START_TIMEOUT_S, Child, keep_up
from sidecar.run.target import reason_of
from sidecar.watch.panel import WatchState, panel
from sidecar.watch.view import SCRAPES, SPANS, WatchView, summary_line

POLL_S = 0.5
DRAW_EVERY_S = 1.0
SLICE_S = 10.0  # of what `report` makes of the logs
SUMMARY_EVERY_S = 60.0
CLOCK_EVERY_S = 1.0
HALTED_S = 10.0  # without a look at the logs: a defect, of which a supervisor is to know
# What is reported on at the end: some 15,000 requests of three spans, which take 4 s. Who ends a service waits 10 s.
SPAN_BYTES_AT_END = 4_000_000
BROWSERS_S = 1.0  # in which a browser takes the end
UNWRITABLE = "its logs cannot be written"
_FILES_KEPT = 10  # the logs are as many files, so that a tenth of them is deleted at a time


@dataclass(slots=True, kw_only=True)
class Watch:
    """What the tasks of one watch share.

    `clock` is another after the wall clock was set; `wall_ns` reads that one. `looking` is held by who reads the view.
    `looked_s` is when the logs were looked at last, by the monotonic clock. `clock_steps` has when the wall clock was
    set, by the time before, and by how much. `lives` counts receivers that came up, `restarts` those that
    died; `receiver` is None while there is none, and `down_ns` then says since when. `unwritten` scrapes could not be
    kept, `unwritten_before` of them by receivers that ended. `not_ready` is what /readyz answers: why there is no
    receiver, why not all that came is counted, and why it cannot be written; each empty where that is not so.
    """

    path: Path
    clock: Clock
    options: WatchOptions
    given: Sequence[str]
    progress: Progress
    view: WatchView
    page: LivePage
    columns: LiveColumns
    begun_ns: int
    wall_ns: Callable[[], int] = time_of_day_ns
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reload: asyncio.Event = field(default_factory=asyncio.Event)
    receiver: Child | None = None
    ports: tuple[int, int] | None = None
    not_ready: dict[str, str] = field(default_factory=lambda: {"receiver": "starting", "logs": "", "disk": ""})
    lives: int = 0
    restarts: int = 0
    unwritten: int = 0
    unwritten_before: int = 0
    down_ns: int | None = None
    looked_s: float = field(default_factory=time.monotonic)
    clock_steps: tuple[tuple[int, int], ...] = ()

    def warn_and_record(self, text: str) -> None:
        """Warn of something that went wrong, and record it for the report."""
        self.progress.warn(text)
        record_if_possible(self, "note", text=text)


async def watch(
    options: WatchOptions,
    *,
    command: Sequence[str],
    progress: Progress,
    wall_ns: Callable[[], int] = time_of_day_ns,
) -> tuple[str, Path]:
    """Watch until SIGTERM or SIGINT; return its result in a line, and the directory. SIGHUP reads --config again.

    Raises SidelightError before anything is recorded (an address in use, an unusable directory), and where the first
    receiver cannot be started.
    """
    raise_limit()
    run_directory.require_free(options.out)
    require_ports(options)
    clock = anchor(wall_ns)
    page = LivePage()
    async with AsyncExitStack() as stack:
        shared: Watch | None = None
        url = await _served(stack, options, page, lambda: _unready(shared), lambda: _unhealthy(shared))
        about = {"metrics_targets": [{"configured": masked(url), "url": masked(url)} for url in options.metrics]}
        recorded = manifests.recorded(
            options, options.out, command, clock, asyncio.Event(), about=about, slice_duration=SLICE_S
        )
        run_id, path = await stack.enter_async_context(recorded)
        stack.enter_context(claimed(raw := path / run_directory.RAW))
        columns = LiveColumns(run_id, clock.now_ns(), is_by_clock=True)
        view = stack.enter_context(
            WatchView(raw, run_id=run_id, pages=options.metrics, is_shown=progress.mode == "panel", columns=columns)
        )
        shared = Watch(
            path=path,
            clock=clock,
            options=options,
            given=command,
            progress=progress,
            view=view,
            page=page,
            columns=columns,
            begun_ns=clock.now_ns(),
            wall_ns=wall_ns,
        )
        progress.stage(f"live page: {url.removesuffix('metrics')}")
        progress.stage(f"{url}, /healthz and /readyz beside it; logs in {path}")
        stack.enter_context(_signals(shared))
        _begin_recording(shared)
        async with _sending(shared):
            await _until_stopped(shared)
            progress.close()
            record_if_possible(shared, "phase_end", phase="measure")
            await asyncio.to_thread(_look, shared, all_of_it=True)
            _say_what_waits(shared)
        with view.failures.guard():
            page.stream.publish(columns.rows(), b"")
        page.stream.end(lambda: event("final", {"note": f"The watch has ended. Its report is in {path}."}))
        await page.stream.until_left(BROWSERS_S)
        record_if_possible(shared, run_directory.WATCHED, **view.since_start(restarts=shared.restarts))
        elapsed_s = (shared.clock.now_ns() - shared.begun_ns) / 1e9
        return summary_line(view, elapsed_s=elapsed_s, restarts=shared.restarts), path


def _unready(shared: Watch | None) -> str:
    """Return what /readyz answers; empty when the watch is ready."""
    return "starting" if shared is None else next(filter(None, shared.not_ready.values()), "")


def _begin_recording(shared: Watch) -> None:
    if text := run_directory.scarce(shared.path):
        shared.warn_and_record(text)
    record(shared, "phase_start", phase="measure")


def _unhealthy(shared: Watch | None) -> str:
    """Return what /healthz answers; empty while the logs are looked at, before that, and at the end."""
    silent_s = 0.0 if shared is None else time.monotonic() - shared.looked_s
    if shared is None or silent_s < HALTED_S or shared.stop.is_set():
        return ""
    return f"the logs have not been looked at for {silent_s:.0f} s"


def _say_what_waits(shared: Watch) -> None:
    """Warn of what the next collector has not taken, and say who sends it."""
    if shared.view.waiting_exports:
        shared.warn_and_record(
            f"{shared.view.waiting_exports} exports have not reached {masked(shared.options.otlp_forward or '')}; "
            f"the next watch whose directory is in {shared.path.absolute().parent} sends them"
        )


async def _served(
    stack: AsyncExitStack,
    options: WatchOptions,
    page: LivePage,
    unready: Callable[[], str],
    halted: Callable[[], str],
) -> str:
    address = listen_address(options.listen)
    if address is None:
        raise AssertionError("checked options name an address")
    try:
        return await stack.enter_async_context(
            serving(page, *address, unready=unready, unhealthy=halted, guard=guard_of(options))
        )
    except OSError as error:
        raise ConfigurationError(f"--listen {options.listen}: {reason_of(error)}; choose another port, or 0") from error


@contextmanager
def _signals(shared: Watch) -> Iterator[None]:
    """End the watch at SIGTERM and SIGINT; read the configuration file again at SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, shared.stop.set)
    loop.add_signal_handler(signal.SIGHUP, shared.reload.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _until_stopped(shared: Watch) -> None:
    """Receive, scrape, look and reload; then end the receiver, which writes what it has in hand."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_receive_on(shared)), group.create_task(_reload_on(shared))]
            group.create_task(_look_on(shared))
            group.create_task(_draw_on(shared))
            await shared.stop.wait()
            shared.not_ready["receiver"] = "ending"
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _receive_on(shared: Watch) -> None:
    """Keep a receiver up, whatever it dies of. The first has to come up.

    When the wall clock was set, the next receiver stamps by the new time.
    """

    async def life() -> bool:
        shared.unwritten_before = shared.unwritten
        async with Child("the receiver", ["scraper.worker"], heard=lambda said: _on_event(shared, said)) as child:
            await _begin(shared, child)
            moved_ns = await child.while_alive(_clock_step(shared))
            shared.receiver, shared.not_ready["receiver"] = None, "the clock was set, and the receiver starts again"
        await _set_clock(shared, moved_ns)
        return False

    await keep_up(life, lambda death: _on_receiver_death(shared, death))


async def _begin(shared: Watch, child: Child) -> None:
    options, raw = shared.options, shared.path / run_directory.RAW
    number = _next_log(shared)
    host = options.otlp_listen.rpartition(":")[0]
    spans = receiver_spec(options, shared.clock)
    if spans is not None:
        keep = ForwardKeep(
            seconds=options.forward_keep_s, most_bytes=options.kept_bytes // 2, clock_steps=shared.clock_steps
        )
        spans = msgspec.structs.replace(spans, restarts_at_clock_step=True, is_awaited=False, forward_keep=keep)
    if spans is not None and shared.ports is not None:  # senders know these, where any free ones were asked for
        spans = msgspec.structs.replace(spans, grpc=f"{host}:{shared.ports[0]}", http=f"{host}:{shared.ports[1]}")
    spec = Spec(
        targets=list(options.metrics),
        interval_s=options.scrape_interval,
        timeout_s=options.scrape_timeout,
        clock_offset_ns=shared.clock.offset_ns,
        out=str(raw / SCRAPES.replace("*", f"{number:06d}")),
        access=metrics_access(options),
        spans=spans,
        spans_out=str(raw / SPANS.replace("*", f"{number:06d}")),
        rotation=Rotation(most_bytes=options.kept_bytes // _FILES_KEPT, most_s=options.keep_s / _FILES_KEPT),
    )
    await child.begin(spec, stderr=raw / "scraper.stderr")
    ports = await child.expect("listening", timeout_s=START_TIMEOUT_S)
    shared.ports = ports["grpc_port"], ports["http_port"]
    shared.receiver, shared.lives = child, shared.lives + 1
    if shared.down_ns is not None:
        async with shared.looking:
            shared.view.missed(shared.clock.now_ns())
        shared.warn_and_record(f"the receiver runs again after {(shared.clock.now_ns() - shared.down_ns) / 1e9:.1f} s")
        shared.down_ns = None
    shared.not_ready["receiver"] = shared.not_ready["disk"] = ""
    shared.progress.stage(f"spans: gRPC at {host}:{shared.ports[0]}, HTTP/protobuf at {host}:{shared.ports[1]}")


def _on_event(shared: Watch, said: Mapping[str, Any]) -> None:
    """Follow whether the receiver can write its logs."""
    if said.get("event") not in ("unwritten", "written"):
        return
    shared.unwritten = shared.unwritten_before + said["count"]
    if said["event"] == "unwritten" and not shared.not_ready["disk"]:
        shared.not_ready["disk"] = f"{UNWRITABLE}: {said['reason']}"
        shared.warn_and_record(
            f"{UNWRITABLE} ({said['reason']}); the watch goes on, counts what is lost, and refuses spans so that they "
            "are sent again; make room on the disk"
        )
    elif said["event"] == "written" and shared.not_ready["disk"]:
        shared.not_ready["disk"] = ""
        shared.warn_and_record(f"logs are written again; {shared.unwritten} scrapes are lost since the start")


async def _clock_step(shared: Watch) -> int:
    """Wait until the wall clock is set; return by how much, ns."""
    while True:
        if moved_ns := step_ns(shared.clock, shared.wall_ns):
            return moved_ns
        await asyncio.sleep(CLOCK_EVERY_S)


async def _set_clock(shared: Watch, moved_ns: int) -> None:
    """Go on by the new time, once all that is stamped by the old one has been read; no receiver runs meanwhile."""
    async with shared.looking:
        await asyncio.to_thread(_look_through, shared)
        shared.clock_steps += ((shared.clock.now_ns(), moved_ns),)
        shared.clock = anchor(shared.wall_ns)
        shared.begun_ns += moved_ns
        shared.view.clock_moved(moved_ns)
    step = {"moved_ns": moved_ns, "first_log": _next_log(shared), "offset_ns": shared.clock.offset_ns}
    record_if_possible(shared, run_directory.CLOCK_SET, **step)
    shared.warn_and_record(
        f"{step_text(moved_ns)}; stamps are by the new time from here on, and earlier ones are moved by as much"
    )


def _next_log(shared: Watch) -> int:
    """Return the number of the logs that the next receiver writes."""
    return max(next_number(shared.path / run_directory.RAW, pattern) for pattern in (SPANS, SCRAPES))


def _on_receiver_death(shared: Watch, death: WorkerDied) -> None:
    if shared.lives == 0:
        raise death
    shared.receiver = None
    shared.restarts += 1
    if shared.down_ns is None:
        shared.down_ns = shared.clock.now_ns()
    shared.not_ready["receiver"] = "the receiver is down"
    record_if_possible(shared, "receiver_died", reason=str(death), restarts=shared.restarts)
    shared.warn_and_record(
        f"{death}; it is restarted (restart {shared.restarts}); exports in flight must be sent again"
    )


async def _reload_on(shared: Watch) -> None:
    """Read the configuration file again at each SIGHUP; one that is broken changes nothing."""
    while True:
        await shared.reload.wait()
        shared.reload.clear()
        try:
            options, refused = reloaded(shared.options, shared.given)
        except ConfigurationError as error:
            shared.warn_and_record(f"not reloaded, the configuration is unchanged: {error}")
            continue
        for text in refused:
            shared.warn_and_record(f"reload: {text}")
        shared.options = options
        shared.view.scrape_only(options.metrics)
        if shared.receiver is not None:
            await shared.receiver.send(SetTargets(targets=list(options.metrics), interval_s=options.scrape_interval))
        pages = ", ".join(masked(url) for url in options.metrics) or "nothing"
        text = f"reloaded: scraping {pages} every {options.scrape_interval:g} s"
        shared.progress.stage(text)
        record_if_possible(shared, "note", text=text)


async def _look_on(shared: Watch) -> None:
    last_summary_s = asyncio.get_running_loop().time()
    while not shared.stop.is_set():
        async with shared.looking:
            # A thread: estimates take a second, and the page is to be there meanwhile.
            await asyncio.to_thread(_look, shared)
            shared.looked_s = time.monotonic()
            await _publish(shared)
            half_known, breaks = shared.view.half_known_gateways(), shared.view.fresh_breaks()
        for service in half_known:  # which the report says of its own
            shared.progress.warn(
                f"the spans of gateway {service or 'without a service.name'} do not say when its first output left, so "
                f"some of its time counts as network: set {FIRST_TOKEN_ATTRIBUTES[0]} (seconds) on its server span"
            )
        for text in breaks:  # which the report finds in the logs
            shared.progress.warn(f"in the last minute {text}")
        if asyncio.get_running_loop().time() > last_summary_s + SUMMARY_EVERY_S:
            last_summary_s += SUMMARY_EVERY_S
            elapsed_s = (shared.clock.now_ns() - shared.begun_ns) / 1e9
            if shared.progress.mode != "panel":
                shared.progress.stage(summary_line(shared.view, elapsed_s=elapsed_s, restarts=shared.restarts))
        await unless_stopped_for(shared.stop, 0.0 if shared.view.is_behind else POLL_S)


async def _publish(shared: Watch) -> None:
    """Send browsers what came, when it is time to; what a terminal shows too while one is connected."""
    stream = shared.page.stream
    if not stream.is_due:
        return
    with shared.view.failures.guard():
        state = b""
        if stream.is_watched:
            shared.view.show()
            lines = [panel(await asyncio.to_thread(_state, shared)).renderable]
            facts = shared.columns.facts(shared.clock.now_ns())
            state = state_event(f"Sidelight watch {facts['run']}", lines, facts, kept_s=stream.kept_s)
        stream.publish(shared.columns.rows(), state)


async def _draw_on(shared: Watch) -> None:
    """Draw the panel, apart from the looks: a terminal that is slow keeps neither logs nor page waiting."""
    while shared.progress.mode == "panel" and not shared.stop.is_set():
        with shared.view.failures.guard():
            async with shared.looking:
                state = await asyncio.to_thread(_state, shared)
            await asyncio.to_thread(shared.progress.show, panel(state))
        await unless_stopped_for(shared.stop, DRAW_EVERY_S)


@asynccontextmanager
async def _sending(shared: Watch) -> AsyncIterator[None]:
    """Send the page to the server of --prometheus-write while the context is open, with the labels of a scrape."""
    url = shared.options.prometheus_write
    if url is None:
        yield
        return
    from sidecar.live.sending import sending  # noqa: PLC0415  few want it

    instance = f"{socket.gethostname()}:{shared.options.listen.rpartition(':')[2]}"

    def snapshot() -> tuple[int, Snapshot] | None:
        latest = shared.page.latest
        if latest is None:
            return None
        labels = {"job": "sidelight", "instance": instance, **latest.labels}
        return shared.clock.now_ns(), replace(latest, labels=labels)

    async with sending(url, shared.options, snapshot, progress=shared.progress, flush=True):
        yield


def _state(shared: Watch) -> WatchState:
    now_ns = shared.clock.now_ns()
    return shared.view.state(
        now_ns,
        elapsed_s=(now_ns - shared.begun_ns) / 1e9,
        stale_s=STALE_TICKS * shared.options.scrape_interval,
        restarts=shared.restarts,
        receiver_down=shared.not_ready["receiver"],
    )


def _look_through(shared: Watch) -> None:
    """Look until nothing is left that has come so far."""
    _look(shared)
    while shared.view.is_behind:
        _look(shared)


def _look(shared: Watch, *, all_of_it: bool = False) -> None:
    """Read what is new and show it. Nothing is waited for while no receiver is up."""
    now_ns, failures = shared.down_ns or shared.clock.now_ns(), shared.view.failures
    before = failures.count
    shared.view.poll(now_ns, all_of_it=all_of_it)
    shared.not_ready["logs"] = (
        "a defect of Sidelight's: not all that came is counted" if failures.count > before else ""
    )
    with shared.view.failures.guard():
        shared.view.prune(keep_s=shared.options.keep_s, keep_bytes=shared.options.kept_bytes)
    shared.page.update(shared.view.snapshot(restarts=shared.restarts, unwritten=shared.unwritten))
