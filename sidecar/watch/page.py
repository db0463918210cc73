"""Page of a watch: where it is served, the looks at the logs that fill it, the panel, and remote write."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from sidelight.correlator.breakdown import SOURCES
from sidelight.correlator.live.reasons import NO_CLIENT
from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.server import serving
from sidelight.exporter.prometheus.snapshot import Snapshot
from sidelight.recorded.client_spans import FIRST_TOKEN_ATTRIBUTES
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.printable.text import printable
from sidelight.scraper.targets.target import STALE_TICKS
from sidelight.sidecar.live.sending import sending as sending_to
from sidelight.sidecar.options.access import guard_of
from sidelight.sidecar.options.fields import listen_address
from sidelight.sidecar.options.watch import WatchOptions
from sidelight.sidecar.run.phases import unless_stopped_for
from sidelight.sidecar.run.preparation.target import reason_of
from sidelight.sidecar.watch.panel import WatchState, panel, panel_rows
from sidelight.sidecar.watch.processes import Watch
from sidelight.sidecar.watch.view import WatchView, refused
from sidelight.twin.headroom import EVERY_S, LAST_S, MOST_SHARE

POLL_S = 0.5
DRAW_EVERY_S = 1.0
SUMMARY_EVERY_S = 60.0


async def served(
    stack: AsyncExitStack,
    options: WatchOptions,
    port: int | None,
    page: LivePage,
    unready: Callable[[], str],
    halted: Callable[[], str],
) -> str:
    """Serve the page until `stack` is left, and return its URL. Raises ConfigurationError of a port in use."""
    address = listen_address(options.listen)
    if address is None:
        raise AssertionError("checked options name an address")
    host, asked = address
    try:
        return await stack.enter_async_context(
            serving(page, host, port or asked, unready=unready, unhealthy=halted, guard=guard_of(options))
        )
    except OSError as error:
        raise ConfigurationError(
            "listen.in-use", f"--listen {options.listen}: {reason_of(error)}; choose another port, or 0"
        ) from error


async def look_on(shared: Watch) -> None:
    """Look at the logs until the watch is stopped, and warn of broken traces."""
    last_summary_s = asyncio.get_running_loop().time()
    while not shared.stop.is_set():
        async with shared.looking:
            # A thread: estimates take a second, and the page is to be there meanwhile.
            await asyncio.to_thread(look, shared)
            shared.looked_s = time.monotonic()
            await _publish(shared)
            half_known, breaks = shared.view.half_known_gateways(), shared.view.fresh_breaks()
        for service in half_known:  # which the report says of its own
            shared.progress.warn(
                f"the spans of gateway {service or 'without a service.name'} do not say when its first output left, so "
                f"some of its time counts as network: set {FIRST_TOKEN_ATTRIBUTES[0]} (seconds) on its server span"
            )
        for change in shared.view.fresh_changes():
            shared.warn_and_record(change)
        if (verdict := shared.view.fresh_verdict()) and shared.progress.mode != "panel":
            shared.progress.stage(printable(verdict))
        for text in breaks:  # which the report finds in the logs
            shared.progress.warn(f"in the last minute {text}")
        if asyncio.get_running_loop().time() > last_summary_s + SUMMARY_EVERY_S:
            last_summary_s += SUMMARY_EVERY_S
            elapsed_s = (shared.clock.now_ns() - shared.begun_ns) / 1e9
            if shared.progress.mode != "panel":
                shared.progress.stage(summary_line(shared.view, elapsed_s=elapsed_s, restarts=shared.receiver.restarts))
        await unless_stopped_for(shared.stop, 0.0 if shared.view.is_behind else POLL_S)


async def _publish(shared: Watch) -> None:
    """Send new rows to browsers when they are due. While one is connected, it gets the terminal's panel too."""
    if shared.page.stream.is_due:
        with shared.view.failures.guard():
            events = partial(shared.browsers.events, lambda: panel_rows(_state(shared)), shared.clock.now_ns())
            shared.page.stream.publish(*await asyncio.to_thread(events))


async def estimate_twin_on(shared: Watch) -> None:
    """Estimate headroom and drift each minute, and record them now and then.

    Later where an estimate takes more than MOST_SHARE of a core; recorded when the headroom is of other requests.
    """
    due_s, begun_s = EVERY_S, time.monotonic()
    while True:
        await asyncio.sleep(due_s)
        async with shared.looking:
            estimate = shared.view.twin_estimation(shared.clock.now_ns())
        due_s = max(EVERY_S, await asyncio.to_thread(estimate) / MOST_SHARE)
        if time.monotonic() >= begun_s + LAST_S:
            begun_s = time.monotonic()
            shared.record_estimates()


async def draw_on(shared: Watch) -> None:
    """Draw the panel in a task of its own: a slow terminal delays neither logs nor page."""
    while shared.progress.mode == "panel" and not shared.stop.is_set():
        with shared.view.failures.guard():
            async with shared.looking:
                state = await asyncio.to_thread(_state, shared)
            await asyncio.to_thread(shared.progress.show, panel(state))
        await unless_stopped_for(shared.stop, DRAW_EVERY_S)


@asynccontextmanager
async def sending(shared: Watch) -> AsyncIterator[None]:
    """Send the page to the server of --prometheus-write while the context is open. It has the labels of a scrape."""
    url = shared.options.prometheus_write
    if url is None:
        yield
        return
    instance = f"{socket.gethostname()}:{shared.options.listen.rpartition(':')[2]}"

    def snapshot() -> tuple[int, Snapshot] | None:
        latest = shared.page.latest
        if latest is None:
            return None
        labels = {"job": "sidelight", "instance": instance, **latest.labels}
        return shared.clock.now_ns(), replace(latest, labels=labels)

    async with sending_to(url, shared.options, snapshot, progress=shared.progress, flush=True):
        yield


def _state(shared: Watch) -> WatchState:
    return shared.view.state(
        shared.clock.now_ns(),
        elapsed_s=(shared.clock.now_ns() - shared.begun_ns) / 1e9,
        stale_s=STALE_TICKS * shared.options.scrape_interval,
        restarts=shared.receiver.restarts,
        receiver_down=shared.not_ready["receiver"],
    )


def look(shared: Watch, *, all_of_it: bool = False) -> None:
    """Read new data and show them. Nothing is waited for while no receiver is up."""
    now_ns, failures = shared.receiver.down_ns or shared.clock.now_ns(), shared.view.failures
    before = failures.count
    shared.view.poll(now_ns, all_of_it=all_of_it)
    shared.not_ready["logs"] = (
        "a defect of Sidelight's: not all that came is counted" if failures.count > before else ""
    )
    with shared.view.failures.guard():
        shared.view.prune(shared.clock.now_ns(), keep_s=shared.options.keep_s, keep_bytes=shared.options.kept_bytes)
    with shared.view.failures.guard():
        shared.view.judge(shared.clock.now_ns(), stale_s=STALE_TICKS * shared.options.scrape_interval)
    restarts = {"restarts": shared.receiver.restarts, "scraper_restarts": shared.scraper.restarts}
    shared.page.update(shared.view.snapshot(**restarts, unwritten=shared.scraper.unwritten))


def summary_line(view: WatchView, *, elapsed_s: float, restarts: int) -> str:
    counts, received = view.parts.requests, view.receiver_counts
    by_source = "".join(f"{counts[name]} broken down by {name}, " for name in SOURCES[:-1] if counts.get(name))
    unseen = view.parts.missing[NO_CLIENT]
    alone = f", {count_of(unseen, 'engine request')} without a client's span" if unseen else ""
    return (
        f"{count_of(sum(counts.values()), 'request')} in {elapsed_s:.0f} s "
        f"({by_source}{counts[SOURCES[-1]]} without a breakdown){alone}; "
        f"{count_of(received['spans'], 'span')} in {count_of(received['exports'], 'export')}, "
        f"{refused(received)} refused; receiver restarted {count_of(restarts, 'time')}"
        f"{f'. {view.headroom}' if view.headroom else ''}{''.join(f' {change}' for change in view.drift)}"
    )
