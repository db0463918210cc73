"""`--otlp-export`: the spans of a run on their way to a collector. What fails is a warning: the results are on disk."""

from __future__ import annotations

import asyncio

from exporter.otlp.send import send
from exporter.otlp.spans import SpanSource, exports
from rundir.access import Access, masked
from scraper import engines
from sidecar.progress import Progress
from sidecar.report.derive import Derived


def export_run(derived: Derived, url: str, access: Access, progress: Progress) -> None:
    """Send the spans of every request of a run and report the outcome; a failing collector raises nothing."""
    run = derived.run
    where = masked(url)
    if not len(run.requests):
        progress.warn(f"--otlp-export {where}: the run has no requests, so there are no spans to send")
        return
    progress.stage(f"sending the spans of {len(run.requests):,} requests to {where}")
    sent = asyncio.run(send(exports(span_source(derived)), url, access, report=progress.stage))
    if sent.given_up:
        taken = f"{sent.taken:,} spans were accepted" if sent.taken else "no span was accepted"
        progress.warn(
            f"--otlp-export {where}: {sent.reason}; {taken}; "
            f"`sidelight report {run.path} --otlp-export URL` sends all again"
        )
        return
    progress.stage(f"{where} accepted {sent.taken:,} spans")
    if sent.rejected:
        progress.warn(
            f"--otlp-export {where}: rejected {sent.rejected:,} spans: {sent.reason or 'it does not say why'}"
        )


def span_source(derived: Derived) -> SpanSource:
    """Return what the spans of a run are made from."""
    run = derived.run
    detected = (engines.detect(endpoint.series) for endpoint in run.endpoints)
    manifest = run.manifest
    return SpanSource(
        run_id=str(manifest["run_id"]),
        version=str(manifest["tool"]["version"]),
        model=str(manifest["config"].get("model") or ""),
        protocol=str(manifest["config"].get("endpoint") or "chat"),
        provider=next((engine.name for engine in detected if engine is not None), ""),
        requests=run.requests,
        parts=derived.times.parts,
    )
