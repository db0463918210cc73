"""Alerts beside the verdict, each once: an early end, losses, distrust. They change how the rest is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from sidelight.exporter.summary.result import Summary, generator_held_up, unknown_clock
from sidelight.loadgen.requests.self_check.nodes import clock_line
from sidelight.recorded.integrity import Integrity, LogIntegrity
from sidelight.rundir.printable.numbers import agree, count_of
from sidelight.rundir.printable.text import as_sentence, first_of
from sidelight.scraper.window.summary import Gap

FAILING_IN_PART = 0.01  # of the requests: with more failures than that a run is not called healthy


def alerts(summary: Summary) -> Iterator[str]:
    """Yield them as sentences, worst first: whether another system was measured than was declared, then what became of
    requests, then by how much their times may be off.
    """
    contradictions = [each for test in summary.methodology.tests.values() for each in test.contradictions or ()]
    first_line, counts = summary.self_check.first_line, summary.client.requests
    said = {*damage_lines(summary.integrity), failed_line(summary).rstrip(".") if is_failing(summary) else ""}
    if (node := unknown_clock(summary)) is not None:
        said.add(clock_line(node))
    warnings = [warning for warning in summary.warnings if warning.rstrip(".") not in said]
    distrust = [first_line] if first_line and not generator_held_up(summary) else []
    failures_first = summary.status != "complete" or counts.ok < counts.sent
    for text in contradictions + (warnings + distrust if failures_first else distrust + warnings):
        yield as_sentence(text)


def loss_lines(integrity: Integrity) -> Iterator[str]:
    """Yield the shares of the load that were lost with their load worker."""
    for lost in integrity.lost_shares or ():
        since = "the start" if lost.last_s is None else f"{lost.last_s:.1f} s into the load"
        known = ((lost.per_s_before, "up to then"), (lost.per_s_after, "after it"))
        rates = [f"{rate:,.1f} requests/s {when}" for rate, when in known if rate is not None]
        yield (
            f"A share of the load was not sent from {since} on ({lost.reason}): of {count_of(lost.planned, 'request')} "
            f"{lost.recorded:,} are recorded, {lost.in_part:,} in part, {lost.due:,} were due and are not recorded, "
            f"{lost.unsent:,} were never sent; all workers sent {' and '.join(rates) or 'nothing'}. Not compliant."
        )


def is_failing(summary: Summary) -> bool:
    """Return whether the verdict is about failures: the server stopped answering, or many requests failed."""
    requests = summary.client.requests
    failed = requests.failed + requests.refused
    return summary.client.outage is not UNSET or failed >= FAILING_IN_PART * requests.sent > 0


def restarted(summary: Summary) -> bool:
    """Return whether an engine restarted and served again."""
    return any(warning.startswith("the engine at ") and " restarted (" in warning for warning in summary.warnings)


def failed_line(summary: Summary) -> str:
    """Return the warning on requests that did not succeed; "" without failures."""
    client = summary.client
    failed = client.requests.failed + client.requests.refused
    begin = f"{failed} of {client.requests.sent} requests did not succeed"
    kinds = ", ".join(f"{kind} ({count})" for kind, count in client.errors.items())
    lines = (warning for warning in summary.warnings if warning.startswith(begin))
    return f"{next(lines, f'{begin}: {kinds}').rstrip('.')}." if failed else ""


def torn_lines(integrity: Integrity) -> Iterator[str]:
    """Yield an alert on the last, incomplete records of killed processes. A process had not written more, so that no
    number differs for it.
    """
    torn = [f"{log.lost_bytes:,} bytes of {_file(log)}" for log in integrity.logs if log.state == "torn"]
    if torn:
        yield f"the last record of a process that was killed is cut off and not used: {first_of(torn)}"


def gap_line(gaps: Sequence[Gap], *, start_ns: int) -> str:
    """Return a sentence on the times when the scraper was down, and their meaning. The measurement began at
    `start_ns`.
    """
    meaning = "totals are whole, since the engine's counters went on; when within that time they rose is not known"
    after = "and the server's results end there"
    return _gap_line("the scraper", gaps, start_ns, nothing="nothing was scraped", after=after, meaning=meaning)


def span_gap_line(gaps: Sequence[Gap], *, start_ns: int) -> str:
    """Return the same sentence of the receiver of spans: that it stood still before is not known."""
    nothing, after = "no span was received", "and later requests have no times from spans"
    lost = "spans that were sent meanwhile are lost unless their sender sent them again"
    return _gap_line("the receiver", gaps, start_ns, nothing=nothing, after=after, meaning=lost, least="at least ")


def _gap_line(
    who: str, gaps: Sequence[Gap], start_ns: int, *, nothing: str, after: str, meaning: str, least: str = ""
) -> str:
    first, last = gaps[0], gaps[-1]
    times = f", the first of {len(gaps)} times" if len(gaps) > 1 else ""
    died = f"{who} died {_moment(first, start_ns)}{times} ({first.reason})"
    if last.end_ns is None:
        when = "after that" if last is first else f"after {(last.start_ns - start_ns) / 1e9:.1f} s"
        return f"{died} and could not be started again: {nothing} {when}, {after}"
    down_s = sum((gap.end_ns or gap.start_ns) - gap.start_ns for gap in gaps) / 1e9
    return f"{died} and was started again: {nothing} for {least}{down_s:.1f} s; {meaning}"


def _moment(gap: Gap, start_ns: int) -> str:
    begun_s = (gap.start_ns - start_ns) / 1e9
    return f"{abs(begun_s):.1f} s {'into' if begun_s >= 0 else 'before'} the measurement"


def damage_lines(integrity: Integrity) -> Iterator[str]:
    """Yield an alert on missing or damaged records, without which no number can be trusted. There is none where no
    record is known to be missing.
    """
    if what := damage_of(integrity):
        yield (
            f"Recorded data of this run are missing or damaged: {what}. All numbers are derived from what is left, and "
            "are not those of the whole run; restore raw/ and manifest.json from a copy."
        )


def damage_of(integrity: Integrity) -> str:
    """Return a description of missing or damaged records, "" without any."""
    damaged = [_what_is_lost(log) for log in integrity.logs if log.state == "damaged"]
    return "; ".join(first_of(lines, separator="; ") for lines in (damaged, integrity.disagreements) if lines)


def _what_is_lost(log: LogIntegrity) -> str:
    known = log.frames + log.lost_frames
    lost = []
    if log.lost_frames:
        lost = [f"{log.lost_frames:,} of {known:,} records {agree(log.lost_frames, 'is', 'are')} lost"]
    if not lost and log.lost_bytes:
        lost = [f"{log.lost_bytes:,} bytes cannot be read"]
    if log.unreadable:
        lost += [f"{count_of(log.unreadable, 'record')} {agree(log.unreadable, 'makes', 'make')} no sense"]
    why = f" ({log.reason})" if log.reason else ""
    return f"{_file(log)}: {', '.join(lost) or 'it is damaged'}{why}"


def _file(log: LogIntegrity) -> str:
    """Return the place of a log: one of several directories names its own."""
    directory, _, name = log.log.rpartition("/")
    return f"{directory}/raw/{name}" if directory else f"raw/{name}"
