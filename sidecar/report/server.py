"""The server's half of a run: what its engines showed, and when nothing was scraped."""

from __future__ import annotations

import msgspec

from scraper.window.gateways import gateway_pages
from scraper.window.summary import Gap, Server, server_summary
from scraper.window.window import Window
from sidecar.directory import SCRAPER_DIED, SCRAPER_RESTARTED, Run
from sidecar.errors import DamagedRun


def server_of(run: Run, window: Window, slice_ns: int) -> Server:
    """Return what the engines and gateways stated; of a run that found no page, why."""
    version, reason = run.manifest.get("target", {}).get("version"), run.manifest.get("server_missing")
    server = server_summary(run.endpoints, window, slice_ns, engine_version=version, gaps=gaps_of(run))
    if gateways := gateway_pages(run.endpoints, window, slice_ns):
        server = msgspec.structs.replace(server, gateways=gateways)
    return msgspec.structs.replace(server, reason=reason) if reason else server


def gaps_of(run: Run) -> list[Gap]:
    """Return when the scraper was down: from the first death to the restart after it, however many failed between."""
    gaps: list[Gap] = []
    for event in run.events:
        is_open = bool(gaps) and gaps[-1].end_ns is None
        if event.name == SCRAPER_DIED and not is_open:
            gaps.append(Gap(start_ns=event.at_ns, end_ns=None, reason=str(event.data["reason"])))
        elif event.name == SCRAPER_RESTARTED and is_open:
            gaps[-1] = msgspec.structs.replace(gaps[-1], end_ns=event.at_ns)
    return gaps


def require_server(run: Run) -> None:
    """Raise DamagedRun where a run ended by itself without its scraper, and the server's half was asked for: by a
    `scrape`, by --metrics or by --otlp-listen. A load alone has the client's half.
    """
    config = run.manifest["config"]
    is_asked_for = not config.get("url") or config.get("metrics") or config.get("otlp_listen")
    if run.status == "complete" and is_asked_for and any(gap.end_ns is None for gap in gaps_of(run)):
        raise DamagedRun(f"{run.path}: the scraper died and could not be started again; the server's results end there")
