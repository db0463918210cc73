"""The live page of a run: the reader of its logs, where it is served, and what it is sent to."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sidelight.recorded import events as run_events
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.clock import AnchoredClock
from sidelight.sidecar.live.sending import sending as sending_to
from sidelight.sidecar.options.access import guard_of
from sidelight.sidecar.options.fields import listen_address
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.phases import Session, record_if_possible

DEFAULT_LISTEN = "127.0.0.1:9464"

if TYPE_CHECKING:
    from sidelight.exporter.prometheus.page import LivePage
    from sidelight.exporter.prometheus.snapshot import Snapshot
    from sidelight.sidecar.live.view import LiveRun
    from sidelight.sidecar.run.preparation.prepare import Prepared


async def serve(stack: AsyncExitStack, options: RunOptions, progress: Progress) -> LivePage | None:
    """Serve a live page until `stack` is left; None if none is wanted. Raises ConfigurationError of a port in use."""
    listen, guard = options.listen, guard_of(options)
    address = listen_address(listen or DEFAULT_LISTEN)
    if address is None:
        return None
    from sidelight.exporter.prometheus.page import LivePage  # noqa: PLC0415
    from sidelight.exporter.prometheus.server import serving  # noqa: PLC0415  what `sending` does without
    from sidelight.sidecar.run.preparation.target import reason_of  # noqa: PLC0415

    host, port = address
    page = LivePage()
    try:
        url = await stack.enter_async_context(serving(page, host, port, guard=guard))
    except OSError as error:
        if listen is not None or error.errno != errno.EADDRINUSE:
            raise ConfigurationError(
                "listen.in-use", f"--listen {listen}: {reason_of(error)}; choose another port, or 0"
            ) from error
        url = await stack.enter_async_context(serving(page, host, 0, guard=guard))
        progress.warn(f"port {port} is taken, so the live page is at {url}")
    progress.stage(f"live page: {url.removesuffix('metrics')} (for Prometheus: {url})")
    return page


@asynccontextmanager
async def sending(session: Session, options: RunOptions) -> AsyncIterator[None]:
    """Send the live page to the server of --prometheus-write while the context is open; record how far it came."""
    url = options.prometheus_write
    if url is None:
        yield
        return

    def sends(until_ns: int) -> None:
        record_if_possible(session, run_events.WRITING, url=masked(url), until_ns=until_ns)

    def taken(until_ns: int, samples: int, lost: int) -> None:
        how_far = {"until_ns": until_ns, "samples": samples, "lost": lost}
        record_if_possible(session, run_events.WRITTEN, url=masked(url), **how_far)

    @session.live.failures.guard()
    def snapshot() -> tuple[int, Snapshot] | None:
        return session.clock.now_ns(), session.live.snapshot()

    async with sending_to(url, options, snapshot, progress=session.progress, on_sending=sends, on_taken=taken):
        yield


def reader(
    options: RunOptions, path: Path, run_id: str, clock: AnchoredClock, prepared: Prepared, page: LivePage | None
) -> LiveRun:
    """Return the reader of a run's logs."""
    from sidelight.loadgen.requests.slo.objectives import parse_slo  # noqa: PLC0415  as in run
    from sidelight.scraper.targets.target import STALE_TICKS  # noqa: PLC0415  as in run
    from sidelight.sidecar.live.view import Described, LiveRun  # noqa: PLC0415  as in run

    model = prepared.target.model
    missing = "" if options.otlp_listen else prepared.about.get("server_missing", "")
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
            unread=f"no metrics page of this server could be read ({missing})" if missing else "",
        ),
        stream=None if page is None else page.stream,
    )
