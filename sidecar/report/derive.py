"""Outputs of a run, derived from its directory alone; the same directory gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from sidelight.correlator.opening import open_run, open_shards
from sidelight.exporter import tables
from sidelight.exporter.evaluation.evaluate import Evaluated, evaluate
from sidelight.exporter.evaluation.server import require_server
from sidelight.exporter.server_metrics import server_metrics_files
from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.exporter.summary.result import Summary, as_written
from sidelight.recorded.directory import MANIFEST, RAW, json_text, write_json, write_text, write_whole
from sidelight.recorded.errors import CannotWrite, ConfigurationError, DamagedRun, unusable_place
from sidelight.recorded.failures import evaluating
from sidelight.recorded.run import Run
from sidelight.sidecar.formats import OUTPUT_FORMATS
from sidelight.sidecar.options.fields import DEFAULT_FORMATS

SUMMARY = "summary.json"
AS_ONE = Path("as-one")  # of the shards of a watch, unless --output says another one


def derive(
    path: Path,
    formats: Sequence[str] = (),
    *,
    trace_url: str | None = None,
    span_bytes: int | None = None,
    processes: int = 1,
) -> Evaluated:
    """Read a run directory as `open_run` does, and derive its files as `derive_run` does.

    Raises ConfigurationError where there is none, or one that holds what no run has written.
    """
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return derive_run(open_run(path, span_bytes=span_bytes, processes=processes), formats, trace_url=trace_url)


def derive_as_one(
    paths: Sequence[Path], output: Path, formats: Sequence[str] = (), *, trace_url: str | None = None
) -> Evaluated:
    """Derive the files of all shards together, into another directory.

    Raises ConfigurationError where they are not those, or where the other one is of a run; CannotWrite.
    """
    if (output / MANIFEST).exists():
        raise ConfigurationError("out.in-use", f"--output {output}: holds a run; give another directory")
    with evaluating(", ".join(map(str, paths)), MANIFEST, f"{RAW}/"):
        run = open_shards(paths, output)
    try:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_place("--output", output, error) from error
    with evaluating(", ".join(map(str, paths)), MANIFEST, f"{RAW}/"):
        return derive_run(run, formats, trace_url=trace_url)


def evaluated(path: Path) -> Evaluated:
    """Return the evaluation of a run directory; nothing is written. Raises as `derive` does."""
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return evaluate(open_run(path))


def derive_run(run: Run, formats: Sequence[str] = (), *, trace_url: str | None = None) -> Evaluated:
    """Write the derived files of a run into its directory, and return their contents. Files that cannot be written do
    not stop it: the error is returned.

    `formats` and `trace_url` are those of `--formats` and `--trace-url`; none: those that the run was asked for.
    """
    derived = evaluate(run)
    try:
        _write(
            derived,
            formats or run.manifest["config"].get("formats") or DEFAULT_FORMATS,
            trace_url=trace_url or _link(run.manifest["config"].get("trace_url")),
        )
    except CannotWrite as error:
        return replace(derived, unwritten=error)
    return derived


def _link(trace_url: object) -> str:
    """Return a manifest's link to traces; empty for another kind of link."""
    return trace_url if isinstance(trace_url, str) and trace_url.startswith(("http://", "https://")) else ""


def _write(derived: Evaluated, wanted: Sequence[str], *, trace_url: str) -> None:
    run, summary, path = derived.run, derived.summary, derived.run.path
    reuse = derived.reuse.requests
    write_json(path / SUMMARY, msgspec.to_builtins(as_written(summary)))
    for name, write in server_metrics_files(_server_metrics(derived), wanted):
        write_whole(path / name, write)
    write_whole(
        path / "requests.parquet",
        lambda file: tables.write_requests(run.requests, derived.parts, reuse, run.nodes, file),
    )
    slices = tables.timeslices_table(summary)
    write_whole(path / "timeslices.parquet", lambda file: tables.write_parquet(slices, file))
    for output in OUTPUT_FORMATS:
        if output.name in wanted:
            write_text(path / output.file, output.text(derived, trace_url=trace_url))


def as_json(summary: Summary) -> str:
    """Return `summary.json` of a run."""
    return json_text(msgspec.to_builtins(as_written(summary)))


def require_sound(derived: Evaluated) -> None:
    """Raise an error for results that were not written or are damaged. CannotWrite where they could not be written, and
    DamagedRun where records are lost of a run that ended by itself: its results are not those of the run. So too where
    the server's were asked for and the scraper was lost.
    """
    if derived.unwritten is not None:
        raise derived.unwritten
    run = derived.run
    if run.status != "crashed" and run.integrity.state == "damaged":
        raise DamagedRun(
            "run.damaged",
            f"{run.path}: recorded data are damaged, and all results are derived from what is left of them",
        )
    require_server(run)


def _server_metrics(derived: Evaluated) -> MetricsSource:
    run = derived.run
    targets = run.manifest.get("metrics_targets", ())
    return MetricsSource(
        endpoints=run.endpoints,
        window=derived.window,
        slice_ns=derived.slice_ns,
        benchmark_id=str(run.manifest["run_id"]),
        input_config=run.manifest["config"],
        tool_version=run.manifest["tool"]["version"],
        configured=[target.get("url") or target["configured"] for target in targets],
        phases=[(phase.name, phase.start_ns, phase.end_ns) for phase in run.phases],
    )
