"""Pages of metrics as prometheus-client writes them, with whatever may stand in labels and help texts."""

from __future__ import annotations

import prometheus_client
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary
from prometheus_client.openmetrics import exposition

HOSTILE = st.text(st.sampled_from('ab \\"{}=,\nn#é☃1'), max_size=12)
TAME = st.text(st.sampled_from("ab =,é☃1"), max_size=12)  # the oracle cannot read its own exemplars of other letters


@st.composite
def pages(draw: st.DrawFn, *, openmetrics: bool = False) -> str:
    """A page of text, or of OpenMetrics with exemplars."""
    names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}x" if openmetrics else r"[a-z_:][a-z0-9_:]{0,6}x", fullmatch=True)
    kinds = (Counter, Gauge, Histogram, Summary, Info) if openmetrics else (Counter, Gauge, Histogram)
    exemplars = st.none() | st.fixed_dictionaries({"trace_id": TAME}) if openmetrics else st.none()
    registry = CollectorRegistry()
    for index, name in enumerate(draw(st.lists(names, min_size=1, max_size=5, unique=True))):
        metric = draw(st.sampled_from(kinds))(f"{name}{index}", draw(HOSTILE), ["l", "m"], registry=registry)
        for first, second in draw(st.lists(st.tuples(HOSTILE, HOSTILE), max_size=3, unique=True)):
            child = metric.labels(first, second)
            if isinstance(child, Histogram):
                child.observe(draw(st.floats(0, 10)), exemplar=draw(exemplars))
            elif isinstance(child, Counter):
                child.inc(draw(st.floats(0, 1e12)), exemplar=draw(exemplars))
            elif isinstance(child, Summary):
                child.observe(draw(st.floats(0, 10)))
            elif isinstance(child, Info):
                child.info({"version": draw(HOSTILE)})
            else:
                child.set(draw(st.floats(allow_nan=True)))
    return (exposition if openmetrics else prometheus_client).generate_latest(registry).decode()
