"""A session: its preparation, its processes, and the opening and closing of its run directory.

The conductor times nothing: load workers, the scraper and the receiver of spans stamp and append; it starts them,
watches, and reads what they wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from sidelight.recorded import directory as run_directory
from sidelight.recorded.run import Run
from sidelight.rundir.clock import anchor
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.spans import require_ports
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run import children
from sidelight.sidecar.run import manifest as manifests
from sidelight.sidecar.run import page as page_of_run
from sidelight.sidecar.run.phases import (
    Session,
    stop_on_signals,
    unless_stopped,
    until_deadline,
)

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated
    from sidelight.exporter.prometheus.page import LivePage
    from sidelight.sidecar.live.view import LiveRun
    from sidelight.sidecar.run.processes.nodes import Nodes

    # Returns what becomes of the run, and its evaluation.
    Finish = Callable[[Run], tuple["T", Evaluated]]

T = TypeVar("T")


async def run(
    options: RunOptions,
    *,
    command: Sequence[str],
    progress: Progress,
    finish: Finish[T],
    linger_s: float | None = None,
    nodes: Nodes | None = None,
) -> T:
    """Load and scrape a target, and return the result of `finish`. `finish` gets the run, which was read as it went and
    has the status in its manifest; beside its result it returns its evaluation, which the live page shows until it has
    been scraped, `linger_s` at most (None: as long as scrapes so far were apart). Load workers run on `nodes`; None: on
    those of --ray, else here.

    Raises SidelightError before anything is recorded (bad target, unusable directory), and when one of our own
    processes died (the manifest then says `crashed`, and why).
    """
    async with AsyncExitStack() as serving:
        nodes = nodes or serving.enter_context(nodes_of(options, progress))
        with ExitStack() as reading:
            live, page = await _run(options, reading, serving, nodes, command=command, progress=progress)
            run = live.logs.run()
            result, derived = finish(run)
        if page is not None and page.latest is not None:
            from sidelight.sidecar.live.final import final, final_event, linger  # noqa: PLC0415  what a run need not wait for

            page.stream.end(cache(lambda: final_event(derived)))
            await linger(page, final(page.latest, run, derived.parts, derived.summary), linger_s)
        return result


@contextmanager
def nodes_of(options: RunOptions, progress: Progress) -> Iterator[Nodes | None]:
    """Open the nodes of --ray while the context is open; None without it. Raises SidelightError, in one line."""
    if options.ray is None:
        yield None
        return
    from sidelight.sidecar.run.processes.nodes import opened  # noqa: PLC0415  few runs have others

    with opened(options, progress) as nodes:
        yield nodes


async def _run(
    options: RunOptions,
    reading: ExitStack,
    serving: AsyncExitStack,
    nodes: Nodes | None,
    *,
    command: Sequence[str],
    progress: Progress,
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
        processes = await stack.enter_async_context(AsyncExitStack())
        remote = [] if nodes is None else nodes.places()
        workers, scraper, receiver = await children.started(processes, options, remote, clock)
        # Ours are imported while theirs are.
        from sidelight.sidecar.run.load import load  # noqa: PLC0415
        from sidelight.sidecar.run.preparation.prepare import prepare  # noqa: PLC0415

        async with until_deadline(begun_s, options.deadline):
            prepared = await unless_stopped(stop, stack.enter_async_context(prepare(options, progress=progress)))
        page = await page_of_run.serve(serving, options, progress)
        model = prepared.target.model
        about = prepared.about if nodes is None else {**prepared.about, "nodes": list(nodes.facts)}
        recorded = manifests.recorded(options, options.out, command, clock, stop, about=about, model=model)
        run_id, path = await stack.enter_async_context(recorded)
        # They end before the manifest is closed, which states the ends of their logs.
        await stack.enter_async_context(processes.pop_all())
        live = reading.enter_context(page_of_run.reader(options, path, run_id, clock, prepared, page))
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
            may_lose=bool(remote) and options.on_loss == "continue",
            page=page,
        )
        if remote:
            from sidelight.sidecar.run.processes.clocks import compared  # noqa: PLC0415  few runs have others

            await stack.enter_async_context(compared(path, clock, remote))
        session = await children.begun(session, stack, options, prepared, scraper=scraper, receiver=receiver)
        async with page_of_run.sending(session, options):
            await load(session, options, prepared, begun_s=begun_s)
    return live, page
