"""Requests of one or several classes, each with distributions of its own, from one seed.

A workload of the draft and one of a user's file are made of the same parts here. Every class has streams of random
numbers of its own, apart for lengths, content, sharing and sessions, so that changing one leaves the others alone. A
longer sequence begins with the shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sidelight.loadgen.plan.tokenizers.reference import reference
from sidelight.loadgen.plan.workloads import distributions
from sidelight.loadgen.plan.workloads.content import about_content, token_ids
from sidelight.loadgen.plan.workloads.distributions import Distribution, Fixed, pick, whole, zipf_weights
from sidelight.loadgen.plan.workloads.request import Shared, Turn, WorkloadRequest

# Its place among the streams that may be spawned from a run's seed.
SPAWN_KEY = 2
_BLOCK = 256
ONE_TURN = Fixed(1)
NO_PAUSE = Fixed(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Pieces that requests share: `share` of the requests begin with one of `count`, chosen by Zipf's law.

    zipf  the exponent; 0 chooses evenly
    """

    count: int
    tokens: Distribution
    share: float
    zipf: float = 0.0

    def about(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "count": self.count,
            "tokens": distributions.about(self.tokens),
            "zipf_s": self.zipf,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One class of requests.

    input_tokens   the user's message with its question, in tokens as declared; what is shared comes on top
    output_tokens  asked for by max_tokens
    content        of the own part, of the prefixes and of the system prompts; one of content.CONTENTS
    question       what the message ends with
    turns          how many turns a session has; 1 without a session
    body           further fields of the requests' bodies, such as a priority
    model          the model that its requests ask; "" leaves it to the target
    think_s        seconds between a reply's end and the next turn
    """

    name: str
    weight: float = 1.0
    input_tokens: Distribution
    output_tokens: Distribution
    content: str = "random-tokens"
    temperature: float = 0.0
    system: Sharing | None = None
    prefixes: Sharing | None = None
    question: str = ""
    turns: Distribution = ONE_TURN
    think_s: Distribution = NO_PAUSE
    model: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)


def requests(classes: Sequence[RequestClass], *, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests without end, each of a class drawn by weight."""
    streams = [class_requests(traffic_class, seed=seed, stream=at) for at, traffic_class in enumerate(classes)]
    if len(streams) == 1:
        yield from streams[0]
    rng = stream_rng(seed, len(classes))
    weights = tuple(traffic_class.weight for traffic_class in classes)
    while True:
        for at in pick(rng, weights, _BLOCK).tolist():
            yield next(streams[at])


def class_requests(traffic_class: RequestClass, *, seed: int, stream: int = 0) -> Iterator[WorkloadRequest]:
    """Yield requests of one class without end. `stream` distinguishes the classes of one workload."""
    lengths, content, shared, session = (stream_rng(seed, stream, part) for part in range(4))
    systems = share(traffic_class.system, f"system-{stream}", traffic_class.content, stream_rng(seed, stream, 4))
    prefixes = share(traffic_class.prefixes, f"prefix-{stream}", traffic_class.content, stream_rng(seed, stream, 5))
    suffix_tokens = reference().count(traffic_class.question) if traffic_class.question else 0
    while True:
        inputs = whole(traffic_class.input_tokens, lengths, _BLOCK).tolist()
        outputs = whole(traffic_class.output_tokens, lengths, _BLOCK).tolist()
        turns = whole(traffic_class.turns, session, _BLOCK).tolist()
        with_system = choose(traffic_class.system, systems, shared)
        with_prefix = choose(traffic_class.prefixes, prefixes, shared)
        for input_tokens, max_tokens, turn_count, system, prefix in zip(
            inputs, outputs, turns, with_system, with_prefix, strict=True
        ):
            content_tokens = max(1, input_tokens - suffix_tokens)
            on_top = (system.tokens if system else 0) + (prefix.tokens if prefix else 0)
            yield WorkloadRequest(
                workload_class=traffic_class.name,
                token_ids=token_ids(traffic_class.content, content_tokens, content),
                input_tokens=on_top + content_tokens + suffix_tokens,
                max_tokens=max(1, max_tokens),
                temperature=traffic_class.temperature,
                system=system,
                prefix=prefix,
                suffix=traffic_class.question,
                body=traffic_class.body,
                model=traffic_class.model,
                turns=later_turns(traffic_class, turn_count, content, session) if turn_count > 1 else (),
            )


def later_turns(
    traffic_class: RequestClass, turn_count: int, content: np.random.Generator, session: np.random.Generator
) -> tuple[Turn, ...]:
    """Return the later turns of a session. Their lengths are drawn from the class's own distributions."""
    later = turn_count - 1
    inputs = np.maximum(whole(traffic_class.input_tokens, session, later), 1).tolist()
    outputs = np.maximum(whole(traffic_class.output_tokens, session, later), 1).tolist()
    thinks = np.maximum(traffic_class.think_s.draw(session, later), 0.0).tolist()
    return tuple(
        Turn(token_ids=token_ids(traffic_class.content, n, content), input_tokens=n, max_tokens=m, think_s=think)
        for n, m, think in zip(inputs, outputs, thinks, strict=True)
    )


def share(sharing: Sharing | None, name: str, content: str, rng: np.random.Generator) -> tuple[Shared, ...]:
    """Return the pieces that are shared, in the order of their popularity."""
    if sharing is None:
        return ()
    lengths = np.maximum(whole(sharing.tokens, rng, sharing.count), 1).tolist()
    return tuple(
        Shared(name=f"{name}-{at}", token_ids=token_ids(content, n, rng), tokens=n) for at, n in enumerate(lengths)
    )


def choose(sharing: Sharing | None, pieces: Sequence[Shared], rng: np.random.Generator) -> list[Shared | None]:
    """Return the shared piece of each request of a block, or None. The request begins with that piece."""
    if sharing is None:
        return [None] * _BLOCK
    shares = rng.random(_BLOCK) < sharing.share
    which = pick(rng, zipf_weights(len(pieces), sharing.zipf), _BLOCK)
    return [pieces[at] if shared else None for at, shared in zip(which.tolist(), shares.tolist(), strict=True)]


def stream_rng(seed: int, *key: int) -> np.random.Generator:
    """Return a stream of random numbers of this workload, apart from the run's other streams."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPAWN_KEY, *key)))


def about(classes: Sequence[RequestClass]) -> dict[str, Any]:
    """Return the report's description of the classes: lengths, content, sharing and sessions."""
    total = sum(traffic_class.weight for traffic_class in classes)
    return {
        "classes": [_about(replace(traffic_class, weight=traffic_class.weight / total)) for traffic_class in classes]
    }


def _about(traffic_class: RequestClass) -> dict[str, Any]:
    sessions = (
        {}
        if traffic_class.turns == ONE_TURN
        else {
            "turns": distributions.about(traffic_class.turns),
            "think_time_s": distributions.about(traffic_class.think_s),
        }
    )
    return {
        "name": traffic_class.name,
        "fraction": traffic_class.weight,
        "input_tokens": distributions.about(traffic_class.input_tokens),
        "output_tokens": {**distributions.about(traffic_class.output_tokens), "control": "max_tokens"},
        **about_content(traffic_class.content),
        "temperature": traffic_class.temperature,
        **({"model": traffic_class.model} if traffic_class.model else {}),
        "system_prompt": None if traffic_class.system is None else traffic_class.system.about(),
        "shared_prefix": None if traffic_class.prefixes is None else traffic_class.prefixes.about(),
        **({"question_tokens": reference().count(traffic_class.question)} if traffic_class.question else {}),
        **({"body": dict(traffic_class.body)} if traffic_class.body else {}),
        **sessions,
    }


def endless_order(count: int, *, seed: int, stream: int) -> Iterator[int]:
    """Yield positions 0 to count - 1 in random order, without end. All of them come before any comes again."""
    rng = stream_rng(seed, stream)
    while True:
        yield from rng.permutation(count).tolist()
