"""A page in the form of prometheus_client's multiprocess mode, from metrics in this process.

Multiprocess mode has no `_created` series and no process_ or python_ families, shows a family only once it has a
series, and states a histogram's sum before its buckets. The reply's format is negotiated from the Accept header.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

_ORDER = ("_sum", "_bucket", "_count")


class MultiprocessView:
    """View of a registry as in multiprocess mode; a collector in prometheus_client's sense."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if family.type == "histogram":
                family.samples = _sums_first(family.samples)
            if family.samples:
                yield family


def negotiated(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the registry's page and its content type, chosen as prometheus_client's own server chooses it."""
    encode, content_type = choose_encoder(accept)
    return encode(MultiprocessView(registry)), content_type


def _sums_first(samples: list[Sample]) -> list[Sample]:
    return [
        sample
        for _, group in groupby(samples, key=_without_le)
        for sample in sorted(group, key=lambda sample: _ORDER.index("_" + sample.name.rpartition("_")[2]))
    ]


def _without_le(sample: Sample) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in sample.labels.items() if name != "le")
