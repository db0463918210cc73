"""`--otlp-export` and `--prometheus-write`: results on their way to a server. What fails is a warning."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from sidelight.correlator.breakdown import Parts
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.otlp.metrics import metric_exports
from sidelight.exporter.otlp.send import Sent, send
from sidelight.exporter.otlp.spans import SpanSource, exports
from sidelight.exporter.prometheus.remote_write import write
from sidelight.exporter.summary.result import Summary
from sidelight.recorded.events import WRITING, WRITTEN
from sidelight.recorded.run import Run
from sidelight.rundir.access import Access, bare, masked
from sidelight.rundir.columns import held
from sidelight.rundir.printable.numbers import count_of
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.spans.spec import METRICS, TRACES
from sidelight.sidecar.options.spans import ExportOptions, RemoteWriteOptions, SpanOptions, forward_access, write_access
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.report.history import history

# A collector of one signal alone does not know the path, or the service, of the other.
_UNKNOWN = ("HTTP 404", "HTTP 405", "UNIMPLEMENTED")


def export_run(derived: Evaluated, url: str, access: Access, progress: Progress) -> None:
    """Send the spans and metrics of a run, and report the outcome. The spans are those of every request. A failing
    collector raises nothing. A URL with a path that ends in /v1/metrics gets metrics alone.
    """
    run = derived.run
    where = masked(url)
    if not len(run.requests):
        progress.warn(f"--otlp-export {where}: the run has no requests, so there are no spans to send")
        return
    source = span_source(derived)
    sent = None
    if not urlsplit(bare(url)).path.rstrip("/").endswith("/v1/metrics"):
        progress.stage(f"sending the spans of {len(run.requests):,} requests to {where}")
        sent = send(exports(source), TRACES, url, access, report=progress.stage)
        _report(sent, "span", derived, where, progress)
    if sent is None or not sent.is_away:
        start_ns = min((event.at_ns for event in run.events), default=0)
        steps = history(run, derived.parts, derived.summary)
        metrics = metric_exports(source, steps, start_ns=start_ns)
        was_taken = sent is not None and not sent.given_up
        sent = send(metrics, METRICS, url, access, report=progress.stage)
        if was_taken and sent.given_up and not sent.taken and sent.reason.startswith(_UNKNOWN):
            progress.stage(f"{where} takes no metrics ({sent.reason})")
        else:
            _report(sent, "metric point", derived, where, progress)


def _report(sent: Sent, what: str, derived: Evaluated, where: str, progress: Progress) -> None:
    if sent.given_up:
        taken = f"accepted: {count_of(sent.taken, what)}" if sent.taken else f"no {what} was accepted"
        progress.warn(
            f"--otlp-export {where}: {sent.reason}; {taken}; "
            f"`sidelight report {derived.run.path} --otlp-export URL` sends all again"
        )
        return
    progress.stage(f"{where} accepted {sent.taken:,} {what}s")
    if sent.rejected:
        reason = sent.reason or "it does not say why"
        progress.warn(f"--otlp-export {where}: rejected {sent.rejected:,} {what}s: {reason}")


def span_source(derived: Evaluated) -> SpanSource:
    """Return the source of a run's spans."""
    run = derived.run
    detected = (engines.detect(endpoint.series) for endpoint in run.endpoints)
    manifest = run.manifest
    return SpanSource(
        run_id=str(manifest["run_id"]),
        version=str(manifest["tool"]["version"]),
        model=str(manifest["config"].get("model") or ""),
        protocol=str(manifest["config"].get("endpoint") or "chat"),
        provider=next((engine.name for engine in detected if engine is not None), ""),
        requests=held(run.requests),
        parts=derived.parts,
    )


def _write_run(run: Run, parts: Parts, summary: Summary, wanted: RemoteWriteOptions, progress: Progress) -> None:
    """Send the history of a run by remote write and report the outcome; a failing server raises nothing.

    A server to which the run was sent while it went gets what came after that. What it was being sent when the run was
    cut short it may have or not: the last step, the report's numbers, is later.
    """
    url = wanted.prometheus_write
    if url is None:
        return
    where = masked(url)
    progress.stage(f"sending the series of the run to {where}")
    sendings = [event for event in run.events if event.data.get("url") == where]
    live = [event.data for event in sendings if event.name == WRITTEN][-1:]
    sent_ns = [event.data["until_ns"] for event in sendings if event.name == WRITING]
    after_ns = live[0]["until_ns"] if live else None
    steps = history(run, parts, summary, after_ns=after_ns, sent_ns=max(sent_ns, default=0))
    sent = asyncio.run(write(steps, url, write_access(wanted), report=progress.stage))
    before = "".join(f", after {data['samples']:,} while it went" for data in live)
    taken = f"{sent.samples:,} samples{before}"
    if sent.reason:
        progress.warn(
            f"--prometheus-write {where}: {sent.reason}; it took {taken}; "
            f"`sidelight report {run.path} --prometheus-write URL` sends the rest"
        )
    else:
        there = f"; {sent.there:,} others, or newer ones, were there already" if sent.there else ""
        progress.stage(f"{where} took {taken}{there}")
    if sent.too_old:
        progress.warn(
            f"--prometheus-write {where}: {count_of(sent.too_old, 'sample')} too old for it; write "
            "--formats openmetrics and create blocks of it"
        )
    if lost := sum(data["lost"] for data in live):
        progress.warn(
            f"--prometheus-write {where}: {count_of(lost, 'sample')} dropped while it took none; its counters and "
            "histograms end at the report's numbers all the same"
        )


def send_results(derived: Evaluated, wanted: ExportOptions, options: SpanOptions, progress: Progress) -> None:
    """Send the results of a run to the servers that were named."""
    if wanted.otlp_export is not None:
        export_run(derived, wanted.otlp_export, forward_access(options), progress)
    if wanted.prometheus_write is not None:
        _write_run(derived.run, derived.parts, derived.summary, wanted, progress)
