"""The metrics of each request by the draft's definitions, from a `RequestLog`; all pure.

- ttft   first_token - submit
- e2e    last_token - submit; where a reply has no token times (not streamed), end - submit
- tpot   (last_output - first_output) / (output_tokens - 1); none below two tokens, nor where all came in one read. What
         is generated and not visible is counted in output_tokens, so its time is as well; without such events this is
         the draft's last and first token. Reasoning that no event brings is not counted here. Of several choices (n),
         the times of all added up / (output_tokens - choices), since usage counts them together
- itl    gaps between consecutive content chunks of one choice, from its first token on; a true inter-token latency
         only where chunks hold one token each, else "time between chunks" (itl-chunked, itl-sse-measurement)
- jitter standard deviation (of a sample) of a request's gaps, from two gaps on (itl-procedure)
- max pause  the longest gap of a request
- request_output_tps  output_tokens / e2e

A reply that came in one read (`in_one_read`) shows no time between its tokens: tpot, itl, jitter and max pause are NaN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from loadgen.protocols.reading.failures import CONTENT_FILTER
from loadgen.requests.table import RequestLog
from rundir.columns import Bools, Floats, Ints

# Of a reply in one read: with fewer tokens, or sooner behind the submission, an engine may have made all of it at once.
LEAST_TOKENS, LEAST_WAIT_NS = 8, 50_000_000

OTHER_UNIT = 10.0  # times: what is stated that much shorter than it lasts is not in seconds
_APART_MS = 10.0  # by which times of two clocks may differ

_BY_FILTER = re.compile(r"content[ _-]?(filter|management|moderation|policy)|guardrail", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Metrics of a log's requests as columns float64[n], NaN where missing.

    A row is a request of the log; itl_ms is float64[m] of all requests in a row.

    itl_request   int64[m]: the row of the log that each gap belongs to, ascending
    itl_end_ns    int64[m]: when each gap ended
    """

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    request_output_tps: Floats
    itl_mean_ms: Floats
    jitter_ms: Floats
    max_pause_ms: Floats
    itl_ms: Floats
    itl_request: Ints
    itl_end_ns: Ints


def refused_by_filter(log: RequestLog) -> Bools:
    """Return a mask [n] of the requests that a safety system refused.

    It goes by the reason for a reply's end or the text of an error.

    Other errors of the client's doing (HTTP 4xx), such as of a limit of rates, are none of it.
    """
    said = np.array([bool(_BY_FILTER.search(error)) for error in log.error], np.bool_)
    refused: Bools = (log.status == "refused") & (said | (log.finish_reason == CONTENT_FILTER))
    return refused


def in_one_read(log: RequestLog) -> Bools:
    """Return a mask [n] of the replies that came in one read.

    Only replies with at least LEAST_TOKENS tokens that took at least LEAST_WAIT_NS count.
    """
    tokens = np.maximum(log.output_tokens, np.diff(log.chunk_start))
    at_once = (log.first_token_ns >= 0) & (log.first_output_ns == log.first_token_ns)
    waited = (log.submit_ns >= 0) & (log.first_token_ns - log.submit_ns >= LEAST_WAIT_NS)
    whole: Bools = at_once & (log.first_token_ns == log.last_token_ns) & (tokens >= LEAST_TOKENS) & waited
    return whole


def request_metrics(log: RequestLog, *, as_read: bool = False) -> RequestMetrics:
    """Return the metrics of each request of any status. `take` rows first to look at some.

    `as_read` keeps the zero gaps of replies that came in one read.
    """
    whole = in_one_read(log) & (not as_read)
    tokens = counts(log.output_tokens)
    e2e_ms = e2e_ns(log.submit_ns, log.last_token_ns, log.end_ns) / 1e6
    later, output_ms = later_tokens(log), output_span_ms(log)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_ms = np.where((later > 0) & (output_ms > 0) & ~whole, output_ms / later, np.nan)
        tps = np.where((tokens > 0) & (e2e_ms > 0), tokens / (e2e_ms / 1e3), np.nan)
    gaps_ms, row, gap_end_ns = content_gaps(log, ~whole)
    mean_ms, jitter_ms, pause_ms = _by_request(gaps_ms, row, len(log))
    return RequestMetrics(
        ttft_ms=ttft_ns(log.submit_ns, log.first_token_ns) / 1e6,
        tpot_ms=tpot_ms,
        e2e_ms=e2e_ms,
        request_output_tps=tps,
        itl_mean_ms=mean_ms,
        jitter_ms=jitter_ms,
        max_pause_ms=pause_ms,
        itl_ms=gaps_ms,
        itl_request=row,
        itl_end_ns=gap_end_ns,
    )


def with_possible_times(log: RequestLog) -> RequestLog:
    """Return a log with NaN for stated times and rates that the reply contradicts.

    They cannot be below 0 or longer than the client waited, nor all together a small part of the time in which the
    output came. A rate is judged by the time that it gives for the tokens.
    """
    waited_ms, came_ms = span_ms(log.submit_ns, log.end_ns), span_ms(log.first_output_ns, log.last_output_ns)

    def fits(time_ms: Floats, stated_ms: Floats) -> Bools:
        return ~((time_ms < 0) | (time_ms > waited_ms + _APART_MS) | (OTHER_UNIT * (stated_ms + _APART_MS) < came_ms))

    prefill_ms, decode_ms, e2e_ms = log.server_prefill_ms, log.server_decode_ms, log.server_e2e_ms
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        stated_ms = np.fmax(e2e_ms, decode_ms + np.nan_to_num(prefill_ms))
        times = fits(prefill_ms, stated_ms) & fits(decode_ms, stated_ms) & fits(e2e_ms, stated_ms)
        prompt_ms = 1e3 * counts(log.input_tokens) / log.server_prompt_tps
        output_ms = 1e3 * counts(log.output_tokens) / log.server_generation_tps
        prompt, output = fits(prompt_ms, np.full_like(prompt_ms, np.nan)), fits(output_ms, output_ms)
    possible = {"prefill_ms": times, "decode_ms": times, "e2e_ms": times}
    possible |= {"prompt_tps": times & prompt, "generation_tps": times & output}
    columns = {f"server_{name}": fit for name, fit in possible.items()}
    return replace(log, **{name: np.where(fit, getattr(log, name), np.nan) for name, fit in columns.items()})


def later_tokens(log: RequestLog) -> Floats:
    """Return the output tokens of requests behind the first of each choice, float64[n]; NaN where unknown."""
    return counts(log.output_tokens) - np.maximum(log.unseen_tokens, 0) - np.maximum(log.choices, 1)


def output_span_ms(log: RequestLog) -> Floats:
    """Return the time from the first output to the last, float64[n]. The times of several choices are added up."""
    return np.where(log.choices > 1, log.output_span_ns / 1e6, span_ms(log.first_output_ns, log.last_output_ns))


def schedule_lateness_ms(log: RequestLog) -> Floats:
    """Return the lateness of each request's dispatch, float64[n], NaN in a closed loop.

    The time that a cap held a request back is not in it: this is the generator's own error.
    """
    return span_ms(log.scheduled_ns + log.held_ns, log.dispatch_ns)


def ttft_ns(submit_ns: Ints, first_token_ns: Ints) -> Floats:
    """Return the time to first token of requests, float64[n]; NaN where there was none."""
    return span_ns(submit_ns, first_token_ns)


def e2e_ns(submit_ns: Ints, last_token_ns: Ints, end_ns: Ints) -> Floats:
    """Return the end-to-end time of requests, float64[n]: to the last token, without one to the end of the reply."""
    return span_ns(submit_ns, np.where(last_token_ns >= 0, last_token_ns, end_ns))


def span_ms(start_ns: Ints, end_ns: Ints) -> Floats:
    """Return milliseconds from one stamp to another as `span_ns` does."""
    return span_ns(start_ns, end_ns) / 1e6


def span_s(start_ns: Ints, end_ns: Ints) -> Floats:
    """Return seconds from one stamp to another as `span_ns` does."""
    return span_ns(start_ns, end_ns) / 1e9


def input_tokens(log: RequestLog) -> Floats:
    """Return the input tokens [n] by the server's usage, else by the declared tokenizer; NaN where neither is known."""
    return counts(np.where(log.input_tokens >= 0, log.input_tokens, log.declared_input_tokens))


def stamped_ms(seconds: Floats) -> Floats:
    """Return the milliseconds of times between stamps, which are whole nanoseconds: to the bit those of `span_ms`."""
    return np.rint(1e9 * seconds) / 1e6


def span_ns(start_ns: Ints, end_ns: Ints) -> Floats:
    """Return nanoseconds from one stamp to another, float64[n]; NaN where either is missing (-1)."""
    return np.where((start_ns >= 0) & (end_ns >= 0), end_ns - start_ns, np.nan)


def counts(values: Ints) -> Floats:
    """Return counts as float64[n]; NaN where missing (-1)."""
    return np.where(values >= 0, values, np.nan)


def content_gaps(log: RequestLog, of_requests: Bools) -> tuple[Floats, Ints, Ints]:
    """Return the gaps between contents of one choice, ms, of these requests [n]: each with its request and its end."""
    if len(log.chunk_ns) < 2:
        return np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)
    row = np.repeat(np.arange(len(log)), np.diff(log.chunk_start))
    first_ns = log.first_token_ns[row]
    # Blank chunks before the first token, and whatever has no first token, are none of it.
    content = (first_ns >= 0) & (log.chunk_ns >= first_ns) & of_requests[row]
    chunk_ns, same = log.chunk_ns, row[1:] == row[:-1]
    if len(log.chunk_choice):
        choice = np.zeros(len(row), np.int64)
        choice[np.repeat(np.diff(log.choice_start) > 0, np.diff(log.chunk_start))] = log.chunk_choice
        order = np.lexsort((choice, row))
        chunk_ns, content = chunk_ns[order], content[order]
        same &= np.diff(choice[order]) == 0
    same = same & content[:-1] & content[1:]
    gaps_ms: Floats = np.diff(chunk_ns)[same] / 1e6
    return gaps_ms, row[1:][same].astype(np.int64), chunk_ns[1:][same]


def _by_request(gaps_ms: Floats, row: Ints, requests: int) -> tuple[Floats, Floats, Floats]:
    """Return mean, deviation and maximum of each request's gaps, float64[requests].

    NaN where there are too few gaps.
    """
    count = np.bincount(row, minlength=requests)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_ms = np.where(count > 0, np.bincount(row, gaps_ms, requests) / count, np.nan)
        square = np.bincount(row, (gaps_ms - mean_ms[row]) ** 2, requests)
        jitter_ms = np.where(count > 1, np.sqrt(square / (count - 1)), np.nan)
    pause_ms = np.full(requests, np.nan)
    some = count > 0
    if some.any():
        pause_ms[some] = np.maximum.reduceat(gaps_ms, (np.cumsum(count) - count)[some])
    return mean_ms, jitter_ms, pause_ms
