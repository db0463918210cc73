"""Pages of metrics that are valid, however odd: our parsers read of them what prometheus_client's do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from faults.cases import Case, Kind, Setting, Try
from faults.parsers import OPENMETRICS, TEXT
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from sidelight.scraper.exposition import MalformedPage, PageReader

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels]
LABELS = ("a", "b_2", "_c", "Model", "engine")
LETTERS = "abz_AZ09"
ODD = "ab\\\"\n{}=, #'é€\u2028\U0001f600\t\x7f"
NUMBERS = (0.0, -0.0, 1.0, -1.5, 1e-300, 1e300, 5e-324, 2.0**53 + 1, math.inf, -math.inf, math.nan)


def page(
    rng: random.Random,
    *,
    openmetrics: bool,
    labels: Sequence[str] = LABELS,
    odd: Callable[[random.Random], str] | None = None,
) -> str:
    """Return a page of up to five families, each of a name and a type of its own.

    Its labels have names among these, and they and helps such texts.
    """
    odd = odd or _odd
    lines = []
    for number in range(rng.randrange(6)):
        name = f"{rng.choice(('m', 'm:', '_'))}{''.join(rng.choices(LETTERS, k=rng.randrange(6)))}{number}"
        kind = rng.choice(("counter", "gauge", "histogram", "untyped"))
        if rng.random() < 0.5:
            lines.append(f"# HELP {name} {_escaped(odd(rng)).replace(chr(34), '')}".rstrip(" ") if not openmetrics
                         else f"# HELP {name} words")  # fmt: skip
        lines += _family(name, kind, rng, partial(_labels, rng, labels, odd), openmetrics=openmetrics)
    return "\n".join([*lines, *(["# EOF"] if openmetrics else [])]) + "\n"


def _family(
    name: str, kind: str, rng: random.Random, labelled: Callable[[], Labels], *, openmetrics: bool
) -> Iterator[str]:
    declared = "unknown" if openmetrics and kind == "untyped" else kind
    yield f"# TYPE {name}_total counter" if kind == "counter" and not openmetrics else f"# TYPE {name} {declared}"
    for labels in dict.fromkeys(labelled() for _ in range(rng.randrange(1, 4))):
        if kind == "histogram":
            bounds = sorted(rng.sample((0.1, 0.5, 1.0, 2.5, 1e3), rng.randrange(4)))
            counts = sorted(rng.randrange(100) for _ in range(len(bounds) + 1))
            for bound, count in zip([*bounds, math.inf], counts, strict=True):
                yield f"{name}_bucket{_shown((*labels, ('le', _number(bound))))} {_number(count)}"
            yield f"{name}_count{_shown(labels)} {_number(counts[-1])}"
            yield f"{name}_sum{_shown(labels)} {_number(rng.uniform(0, 1e6))}"
        else:
            suffix = "_total" if kind == "counter" else ""
            value = abs(rng.uniform(0, 1e9)) if kind == "counter" else rng.choice((*NUMBERS, rng.uniform(-1e9, 1e9)))
            stamp = rng.choice(("", "", f" {rng.randrange(10**9)}"))
            yield f"{name}{suffix}{_shown(labels)} {_number(value)}{stamp}"


def _labels(rng: random.Random, names: Sequence[str], odd: Callable[[random.Random], str]) -> Labels:
    return tuple((name, odd(rng)) for name in rng.sample(names, rng.randrange(4)))


def _odd(rng: random.Random) -> str:
    return "".join(rng.choices(ODD, k=rng.randrange(9)))


def _shown(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value) or ("NaN" if math.isnan(value) else repr(float(value)))


def reference(text: str, *, openmetrics: bool) -> dict[Sample, float]:
    """Return the samples as prometheus_client reads them. Raises ValueError for what it refuses."""
    families = (openmetrics_families if openmetrics else text_families)(text)
    samples = (sample for family in families for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): float(sample.value) for sample in samples}


@contextmanager
def opened(_: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        openmetrics = case.row == "openmetrics"
        text = page(case.random(), openmetrics=openmetrics)
        try:
            expected = reference(text, openmetrics=openmetrics)
        except ValueError as error:
            return f"the reference refuses a page that is meant to be valid: {error}: {text!r}"
        try:
            read = PageReader().read(text.encode(), OPENMETRICS if openmetrics else TEXT)
        except MalformedPage as error:
            return f"refused: {error}: {text!r}"
        ours = {(each.name, each.labels): value for each, value in zip(read.series, read.values.tolist(), strict=True)}
        different = {key for key in {*ours, *expected} if repr(ours.get(key)) != repr(expected.get(key))}
        return f"{sorted(different)[:2]} differ: {text!r}" if different else ""

    yield attempt


DIFFERENTIAL = Kind(name="pages", rows={"text": 300, "openmetrics": 300}, opened=opened)
