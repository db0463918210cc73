"""Checks and preparations between two steps: is the engine there, idle and the same; its cache emptied; a configuration
set up.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from sidelight.methodology.execution.asking import Variant, variants_of
from sidelight.methodology.execution.record import TargetSeen
from sidelight.methodology.options import StudyOptions
from sidelight.recorded.errors import TargetNotMeasured, TargetUnreachable
from sidelight.rundir.access import masked, root_url
from sidelight.rundir.clock import anchor
from sidelight.rundir.frames import open_append
from sidelight.rundir.printable.masking import blanked, masked_command
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import metrics_paths
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.exposition import MalformedPage, PageReader
from sidelight.scraper.series.resets import START_TIME
from sidelight.scraper.targets.fetch import FetchLimits, discover, open_session, scrape
from sidelight.scraper.targets.scrape import clock_of
from sidelight.scraper.window.aggregate import gauge_values
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.run.preparation.pages import contact_of, pages_access, pages_of, with_pages
from sidelight.sidecar.run.preparation.target import TargetInfo, engine_version, probe

READY_S = 30.0  # an engine that does not answer may be starting again
IDLE_SCRAPES = 2
RESETS = ("/reset_prefix_cache", "/flush_cache")
_PAUSE_S = 0.5
_RESET_S = 30.0
_OUTPUT_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """Load and start time on a configuration's pages at a moment; None where they are missing."""

    running: float | None = None
    waiting: float | None = None
    start_ns: int | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request runs or waits. It is assumed of an engine without these numbers."""
        return not (self.running or 0) and not (self.waiting or 0)


async def look(options: RunOptions) -> Glance:
    """Read the metrics pages of a configuration once."""
    access, limits = pages_access(options), FetchLimits(timeout_s=options.scrape_timeout)
    places = with_pages(options.metrics, pages_of(options.url, contact_of(options)))
    clock, reader = anchor(), PageReader()
    totals: dict[str, float] = {}
    starts: list[float] = []
    async with open_session(access) as session:
        for place in places:
            url = await discover(place, metrics_paths(), access=access, limits=limits)
            if not isinstance(url, str) or clock_of(url):
                continue
            reply = await scrape(
                session, url, tick_ns=clock.now_ns(), clock_offset_ns=clock.offset_ns, limits=limits, access=access
            )
            with suppress(MalformedPage):
                page = reader.read(reply.body, reply.content_type)
                columns = [at for at, series in enumerate(page.series) if series.name == START_TIME]
                starts += [float(page.values[at]) for at in columns if np.isfinite(page.values[at])]
                engine = detect(page.series)
                sources = canonical(page.series, engine.name) if engine is not None else {}
                for name, source in sources.items():
                    if name in ("requests_running", "requests_waiting") and isinstance(source, CanonicalSource):
                        known = gauge_values(page.values[np.newaxis], source)
                        totals[name] = totals.get(name, 0.0) + float(np.nansum(known))
    return Glance(
        running=totals.get("requests_running"),
        waiting=totals.get("requests_waiting"),
        start_ns=int(1e9 * max(starts)) if starts else None,
    )


async def drained(options: RunOptions) -> tuple[Glance, str]:
    """Wait until the engine is idle on two glances in a row. The wait is as long as replies are waited for, at most.

    Returns the last glance, and what to say where the engine was still busy.
    """
    end_s = asyncio.get_running_loop().time() + options.drain_timeout
    idle = 0
    while True:
        glance = await look(options)
        idle = idle + 1 if glance.is_idle else 0
        if idle == IDLE_SCRAPES or (glance.running is None and glance.waiting is None):
            return glance, ""
        if asyncio.get_running_loop().time() > end_s:
            busy = f"{glance.running or 0:g} running and {glance.waiting or 0:g} waiting"
            return glance, f"begun beside other requests: the engine still had {busy} after {options.drain_timeout:g} s"
        await asyncio.sleep(options.scrape_interval)


async def ready(options: RunOptions, *, limit_s: float = READY_S) -> tuple[TargetInfo, str | None]:
    """Return the serving target and its version as soon as it answers. Raises TargetUnreachable after a time limit."""
    contact = contact_of(options)
    end_s = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            served = [await probe(url, model=options.model, contact=contact) for url in options.url]
        except TargetUnreachable:
            if asyncio.get_running_loop().time() > end_s:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            return served[0], await engine_version(served[0].url, contact)


async def death(options: RunOptions, before: Glance) -> str:
    """Return the way in which an engine died since a glance, if known, else ""."""
    try:
        await ready(options, limit_s=0.0)
    except TargetUnreachable:
        return f"the engine died: {masked(options.url[0])} no longer answers"
    start_ns = (await look(options)).start_ns
    if None in (start_ns, before.start_ns) or start_ns == before.start_ns:
        return ""
    return "the engine died and was started again: its start time moved"


async def reset_cache(options: RunOptions) -> str:
    """Empty the prefix cache of every server; return a note if that failed, else ""."""
    async with contact_of(options).session(_RESET_S) as session:
        problems = [problem for url in options.url if (problem := await _reset(session, root_url(url)))]
    return "; ".join(problems)


async def _reset(session: aiohttp.ClientSession, url: str) -> str:
    answers = []
    for path in RESETS:
        try:
            async with session.post(f"{url}{path}") as response:
                if response.status == 200:
                    return ""
                answers.append(f"{path}: HTTP {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answers.append(f"{path}: {type(error).__name__}")
    return f"the prefix cache could not be emptied ({', '.join(answers)}): earlier contents may be in it"


def blank(path: Path) -> None:
    """Overwrite secrets with asterisks in a file that others may still append to."""
    with path.open("r+b") as file:
        content = file.read()
        if (clean := blanked(content)) != content:
            file.seek(0)
            file.write(clean)


def set_up(name: str, variant: Variant, output: Path) -> None:
    """Run the command that sets a configuration up; what it prints goes to a file.

    Raises TargetNotMeasured where it fails, or takes longer than it may: it is then ended, with all that it started.
    """
    command = variant.before
    if not command:
        return
    arguments: Sequence[str] = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    shown = masked_command(command if isinstance(command, str) else shlex.join(command))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SIDELIGHT_")}
    with os.fdopen(open_append(output), "ab") as file:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=inherited,
            )
        except OSError as error:
            raise TargetNotMeasured("variant.before", f"variant {name}: before: {shown}: {error.strerror}") from error
    try:
        code = process.wait(variant.before_s)
    except subprocess.TimeoutExpired:
        raise TargetNotMeasured(
            "variant.before",
            f"variant {name}: before: {shown}: not done after {variant.before_s:g} s; raise before-timeout, or let it "
            f"start the server in the background; its output is in {output}",
        ) from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        blank(output)
    if code:
        last = output.read_text(errors="replace").strip().splitlines()[-1:]
        said = f": {last[0][:_OUTPUT_SHOWN]}" if last else ""
        raise TargetNotMeasured(
            "variant.before", f"variant {name}: before: {shown}: ended with {code}{said}; its output is in {output}"
        )


def targets_seen(
    options: StudyOptions, configurations: Mapping[str, RunOptions], limit_s: float
) -> dict[str, TargetSeen]:
    """Return the target at each configuration's address. Configurations that a command sets up are left out. Raises
    SidelightError.
    """
    later = {name for name, variant in variants_of(options).items() if variant.before}
    seen = {}
    for name, each in configurations.items():
        if name not in later:
            served, version = asyncio.run(ready(each, limit_s=limit_s))
            url, longest = masked(served.url), served.max_model_len
            seen[name] = TargetSeen(url=url, model=served.model, max_model_len=longest, version=version)
    return seen
