"""The metrics of each request by the draft's definitions, from a `RequestLog`; all pure.

- ttft   first_token - submit
- first visible token  the first token that is not reasoning - submit
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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sidelight.loadgen.protocols.reading.failures import CONTENT_FILTER
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats, Ints, stretches, with_columns

# Of a reply in one read: with fewer tokens, or sooner behind the submission, an engine may have made all of it at once.
LEAST_TOKENS, LEAST_WAIT_NS = 8, 50_000_000

STRETCH_CHUNKS = 1 << 20  # of replies that are looked at together
OTHER_UNIT = 10.0  # times: what is stated that much shorter than it lasts is not in seconds
_APART_MS = 10.0  # by which times of two clocks may differ

_BY_FILTER = re.compile(r"content[ _-]?(filter|management|moderation|policy)|guardrail", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Metrics of a log's requests as columns float64[n], NaN where missing; each is computed when it is first read.

    A row is a request of the log, and has `gap_count` gaps; `itl_ms` and `itl_end_ns` have one value for each gap,
    [m] in order of rows. `as_read` keeps the zero gaps of replies that came in one read.
    """

    log: RequestLog
    as_read: bool = False

    @cached_property
    def ttft_ms(self) -> Floats:
        return ttft_ns(self.log.submit_ns, self.log.first_token_ns) / 1e6

    @cached_property
    def first_visible_token_ms(self) -> Floats:
        return ttft_ns(self.log.submit_ns, self.log.first_visible_ns) / 1e6

    @cached_property
    def e2e_ms(self) -> Floats:
        return e2e_ns(self.log.submit_ns, self.log.last_token_ns, self.log.end_ns) / 1e6

    @cached_property
    def tpot_ms(self) -> Floats:
        later, output_ms = later_tokens(self.log), output_span_ms(self.log)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((later > 0) & (output_ms > 0) & self._has_gaps, output_ms / later, np.nan)

    @cached_property
    def request_output_tps(self) -> Floats:
        tokens, e2e_ms = counts(self.log.output_tokens), self.e2e_ms
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((tokens > 0) & (e2e_ms > 0), tokens / (e2e_ms / 1e3), np.nan)

    @property
    def itl_mean_ms(self) -> Floats:
        return self._gaps[0]

    @property
    def jitter_ms(self) -> Floats:
        return self._gaps[1]

    @property
    def max_pause_ms(self) -> Floats:
        return self._gaps[2]

    @property
    def gap_count(self) -> Ints:
        """Return the number of gaps of each request, int64[n]."""
        return self._gaps[3]

    @property
    def itl_ms(self) -> Floats:
        return self._gaps[4]

    @property
    def itl_end_ns(self) -> Ints:
        """Return the time at which each gap ended, int64[m]. It is computed anew whenever it is read."""
        ends_ns, done = np.empty(len(self.itl_ms), np.int64), 0
        for _, _, _, end_ns in content_gaps(self.log, self._has_gaps):
            ends_ns[done : done + len(end_ns)] = end_ns
            done += len(end_ns)
        return ends_ns

    @cached_property
    def _has_gaps(self) -> Bools:
        return ~in_one_read(self.log) | self.as_read

    @cached_property
    def _gaps(self) -> tuple[Floats, Floats, Floats, Ints, Floats]:
        """Return mean, deviation, maximum and number of each request's gaps [n], and all gaps [m]."""
        by_stretch, done = [], 0
        gaps_ms = np.empty(int(self.log.chunk_start[-1]))  # what no gap is written to takes no memory
        for stretch, of_stretch, row, _ in content_gaps(self.log, self._has_gaps):
            gaps_ms[done : done + len(of_stretch)] = of_stretch
            done += len(of_stretch)
            by_stretch.append(_by_request(of_stretch, row, len(stretch)))
        mean_ms, jitter_ms, pause_ms, count = map(np.concatenate, zip(*by_stretch, strict=True))
        return mean_ms, jitter_ms, pause_ms, count, gaps_ms[:done]


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
    """Return the metrics of each request of any status. `take` rows first to look at some."""
    return RequestMetrics(log=log, as_read=as_read)


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
    return with_columns(log, {name: np.where(fit, getattr(log, name), np.nan) for name, fit in columns.items()})


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


def content_gaps(log: RequestLog, of_requests: Bools) -> Iterator[tuple[RequestLog, Floats, Ints, Ints]]:
    """Yield stretches of a log, each with the gaps of these requests [n], ms.

    Gaps lie between contents of one choice. With each comes its request's row in the stretch, and its end, ns.
    """
    begin = 0
    for stretch in stretches(log, STRETCH_CHUNKS):
        yield stretch, *_gaps_of(stretch, of_requests[begin : begin + len(stretch)])
        begin += len(stretch)


def _gaps_of(log: RequestLog, of_requests: Bools) -> tuple[Floats, Ints, Ints]:
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


def _by_request(gaps_ms: Floats, row: Ints, requests: int) -> tuple[Floats, Floats, Floats, Ints]:
    """Return mean, deviation, maximum and number of each request's gaps, [requests].

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
    return mean_ms, jitter_ms, pause_ms, count
