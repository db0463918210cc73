"""Other traffic than the run's, for its twin: a workload's, other lengths, or a recorded trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path

import numpy as np

from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.loadgen.plan.fitting import clip
from sidelight.loadgen.plan.traces import ArrivalTrace, read_trace
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads.custom import parse_lengths
from sidelight.loadgen.plan.workloads.distributions import whole
from sidelight.loadgen.plan.workloads.request import WorkloadRequest
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import Ints
from sidelight.rundir.printable.errors import code_of
from sidelight.rundir.printable.numbers import percent
from sidelight.twin.engine.fit import LEAST_REQUESTS
from sidelight.twin.engine.steps import AnsweredRequests
from sidelight.twin.scenario import Twin, span_s

_DRAWN = 2000  # requests of a workload, or as many as the run had
_CACHE_BLOCK = 16  # tokens
_SEED = 1
_Pieces = Sequence[tuple[Hashable, int]]  # what a prompt begins with: equal keys are equal tokens, so many
_AS_ASKED = "outputs are as long as they are asked for"
_LITTLE = 0.02  # of the prompts' tokens: whether so few are cached makes no difference
_NONE_CACHED = "nothing is taken as cached: the engine has no prefix cache, by its page"
_AS_SHARED = "what prompts share is taken as cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTraffic:
    """Options of `run` for other traffic, "" or None where it is the run's: a workload, a trace, or lengths."""

    workload: str = ""
    trace: Path | None = None
    input_tokens: str = ""
    output_tokens: str = ""

    @property
    def options(self) -> dict[str, str]:
        """Return the options that are given, by their names in a configuration file."""
        return {each.name: str(value) for each in fields(self) if (value := getattr(self, each.name))}

    @property
    def text(self) -> str:
        """Return the options as they are typed, "" of the run's traffic."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())

    def of(self, twin: Twin) -> Twin:
        """Return a twin with this traffic.

        Raises ConfigurationError naming the option or the file, the value and the cure.
        """
        if twin.beside and self.options:
            if self.trace is not None:
                raise ConfigurationError(
                    "predict.traffic",
                    f"{self.text}: the run had {len(twin.engines)} engines, and which of them gets which request of it "
                    "is not known; give a run of one, and --replicas",
                )
            first, *beside = (self.of(replace(each, beside=())) for each in twin.engines)
            return replace(first, beside=tuple(beside))
        given = [*self.options]
        if len(given) > 1 and {"workload", "trace"} & {*given}:
            raise ConfigurationError(
                "option.contradictory",
                f"{self.text}: --workload and --trace have lengths of their own; give one of them",
            )
        try:
            if self.trace is not None:
                return _clipped(_of_trace(twin, read_trace(self.trace), self.text))
            if self.workload:
                return _clipped(_of_workload(twin, self.workload, self.text))
            return _clipped(_of_lengths(twin, self.input_tokens, self.output_tokens)) if given else twin
        except OSError as error:
            raise ConfigurationError("file.unreadable", f"{self.text}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(code_of(error, "option.value"), f"{self.text}: {error}") from error


def _of_lengths(twin: Twin, input_tokens: str, output_tokens: str) -> Twin:
    traffic = _repeated(twin)
    random = np.random.default_rng(_SEED)
    if input_tokens:
        prompts = _drawn(input_tokens, random, len(traffic))
        share = traffic.cached_tokens / traffic.prompt_tokens
        traffic = replace(traffic, prompt_tokens=prompts, cached_tokens=(share * prompts).astype(np.int64))
    if output_tokens:
        traffic = replace(traffic, output_tokens=_drawn(output_tokens, random, len(traffic)))
    return replace(twin, traffic=traffic, notes=(_AS_ASKED,) if output_tokens else ())


def _of_workload(twin: Twin, name: str, given: str) -> Twin:
    """Return a twin with the traffic of a workload, at the run's arrivals."""
    traffic = _repeated(twin)
    drawn = list(islice(workloads.build(name, seed=_SEED).requests, len(traffic)))
    if any(each.turns for each in drawn):
        raise _of_sessions(given)
    prompts = np.array([each.input_tokens for each in drawn])
    cached, notes = _cached(map(_shared, drawn), prompts, twin, given)
    outputs = np.array([each.max_tokens for each in drawn])
    traffic = replace(traffic, prompt_tokens=prompts, cached_tokens=cached, output_tokens=outputs)
    return replace(twin, traffic=traffic, notes=(_AS_ASKED, *notes))


def _of_trace(twin: Twin, trace: ArrivalTrace, given: str) -> Twin:
    """Return a twin with the traffic of a trace, which comes as it did."""
    if trace.later is not None and any(trace.later):
        raise _of_sessions(given)
    cached, notes = _cached(_blocks(trace), trace.input_tokens, twin, given)
    traffic = AnsweredRequests(
        submit_s=trace.offsets_ns / 1e9,
        prompt_tokens=trace.input_tokens,
        cached_tokens=cached,
        output_tokens=trace.output_tokens,
    )
    if len(traffic) < LEAST_REQUESTS or not traffic.submit_s[-1]:
        raise ConfigurationError(
            "predict.traffic",
            f"{given}: {len(traffic)} requests in {traffic.submit_s[-1]:.1f} s are no traffic; give a trace of "
            f"{LEAST_REQUESTS} requests or more, at different times",
        )
    return replace(
        twin,
        traffic=traffic,
        arrival=Arrival(kind="replay", trace_ns=trace.offsets_ns),
        concurrency=None,
        duration_s=span_s(traffic),
        notes=(*trace.notes, *notes),
    )


def _clipped(twin: Twin) -> Twin:
    """Return a twin with requests as long as its model takes, clipped as by `run`."""
    traffic = twin.traffic
    lengths = zip(traffic.prompt_tokens.tolist(), traffic.output_tokens.tolist(), strict=True)
    prompts, outputs = np.array([clip(*each, twin.longest) for each in lengths]).T
    clipped = int(np.sum(prompts + outputs < traffic.prompt_tokens + traffic.output_tokens))
    if not clipped:
        return twin
    cached = np.minimum(traffic.cached_tokens, prompts - 1)
    return replace(
        twin,
        traffic=replace(traffic, prompt_tokens=prompts, cached_tokens=cached, output_tokens=outputs),
        notes=(*twin.notes, f"{clipped} of {len(traffic)} requests are clipped to the model's {twin.longest:,} tokens"),
    )


def _repeated(twin: Twin) -> AnsweredRequests:
    """Return the run's requests, again and again where they are few: the new lengths are known, not drawn by chance."""
    requests = twin.requests
    times = -(-_DRAWN // len(requests))
    later_s = span_s(requests) * np.arange(times)[:, None]
    return AnsweredRequests(
        submit_s=(requests.submit_s + later_s).ravel(),
        prompt_tokens=np.tile(requests.prompt_tokens, times),
        cached_tokens=np.tile(requests.cached_tokens, times),
        output_tokens=np.tile(requests.output_tokens, times),
    )


def _drawn(text: str, random: np.random.Generator, count: int) -> Ints:
    return np.maximum(whole(parse_lengths(text), random, count), 1)


def _of_sessions(given: str) -> ConfigurationError:
    return ConfigurationError(
        "predict.traffic",
        f"{given}: its requests are turns of sessions, each of which waits for the reply before, and a prediction has "
        "none; give a workload or trace without",
    )


def _shared(request: WorkloadRequest) -> _Pieces:
    pieces = [piece for piece in (request.system, request.prefix) if piece is not None]
    names = tuple(piece.name for piece in pieces)
    return [(names[: at + 1], piece.tokens) for at, piece in enumerate(pieces)]


def _blocks(trace: ArrivalTrace) -> Iterator[_Pieces]:
    for numbers in trace.hash_ids or [()] * len(trace.input_tokens):
        yield [(number, trace.block_tokens) for number in numbers]


def _cached(prompts: Iterable[_Pieces], tokens: Ints, twin: Twin, given: str) -> tuple[Ints, tuple[str, ...]]:
    """Return the prompts' cached tokens, and a note.

    A request before began with them too; none are cached where the engine has no prefix cache.

    Raises ConfigurationError where neither the run nor its page shows whether it has.
    """
    seen: set[Hashable] = set()
    shared: Ints = np.array([_known(pieces, seen) for pieces in prompts], np.int64)
    none_cached = np.zeros_like(shared)
    if shared.any() and twin.has_prefix_cache is False:
        return none_cached, (_NONE_CACHED,)
    if shared.sum() <= _LITTLE * tokens.sum():
        return none_cached, ()
    if twin.has_prefix_cache is None and not twin.requests.cached_tokens.any():
        raise ConfigurationError(
            "predict.traffic",
            f"{given}: its prompts share {percent(shared.sum() / tokens.sum())} of their tokens, and the run does not "
            "show whether the engine caches them; give a run whose prompts share their beginnings",
        )
    return np.minimum(shared // _CACHE_BLOCK * _CACHE_BLOCK, tokens - 1), (_AS_SHARED,)


def _known(pieces: _Pieces, seen: set[Hashable]) -> int:
    known, is_known = 0, True
    for key, tokens in pieces:
        is_known &= key in seen
        known += tokens * is_known
        seen.add(key)
    return known
