"""Columns of a page (or matrix) for each entry of an engine's catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sidelight.scraper.engines.catalogue import CatalogueQuantity, Entry, Kind, Labels, Names
from sidelight.scraper.exposition import HistogramColumns, Series, histograms

Item = TypeVar("Item")
LabelSet = tuple[tuple[str, str], ...]
Ranks = tuple[tuple[int, str], ...]
_NUMBERS = {"gauge": ("gauge", "unknown"), "counter": ("counter", "unknown"), "histogram": ("counter", "unknown")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalSource:
    """The place of a canonical quantity in a matrix.

    It is `columns` of a gauge or counter (one a label set), or `histograms`.

    - `metric` is the name or the formula, with the names that the page shows.
    - The sum of `columns` is divided by that of the columns in `over` where there are any (a ratio of two gauges).
    - A histogram may have no buckets (a mean of two counters) and a column to take off its sum (`less`).
    - A counter without columns is one that the engine creates with its first increment: it has counted nothing yet.
    """

    quantity: CatalogueQuantity
    metric: str
    columns: tuple[int, ...] = ()
    histograms: tuple[HistogramColumns, ...] = ()
    over: tuple[int, ...] = ()


def is_copy(labels: LabelSet) -> bool:
    """Return whether a router's page repeats the series of an engine, which the label names."""
    return any(label == "server" for label, _ in labels)


class PageNames:
    """The series of a page by the engine's own names; `exposed` are the names as the page has them.

    Label sets for which `ignored` holds are left out, and of a name under several prefixes all but the first shown.
    """

    def __init__(
        self, series: tuple[Series, ...], known: Names, ignored: Callable[[LabelSet], bool] = lambda _: False
    ) -> None:
        self.known = known
        self.series = _typed(series)
        self.exposed: dict[str, str] = {}
        self.columns: dict[str, list[int]] = {}
        self.groups: dict[str, list[HistogramColumns]] = {}
        normalised: dict[str, str] = {}
        for column, labelled in enumerate(self.series):
            if ignored(labelled.labels):
                continue
            if labelled.name not in normalised:
                normalised[labelled.name] = known.normalised(labelled.name)
            name = normalised[labelled.name]
            if self.exposed.setdefault(name, labelled.name) == labelled.name:
                self.columns.setdefault(name, []).append(column)
        for group in histograms(self.series):
            if ignored(group.labels):
                continue
            family = known.normalised(group.family)
            if self.exposed.setdefault(family, group.family) == group.family:
                self.groups.setdefault(family, []).append(group)

    def source(self, quantity: CatalogueQuantity) -> CanonicalSource | None:
        """Return the source of a quantity on this page, by its first complete entry; None without one."""
        for entry in quantity.metrics:
            if (source := self._find(entry, quantity)) is not None:
                return source
        return None

    def _find(self, entry: Entry, quantity: CatalogueQuantity) -> CanonicalSource | None:
        """Return the source of a quantity on this page by an entry, None if incomplete."""
        if entry.beside and entry.beside not in self.exposed:
            return None
        replaced: dict[str, Any] = dict(entry.replaces)
        source = CanonicalSource(quantity=replace(quantity, **replaced), metric=entry.text(self.exposed))
        kind = quantity.kind
        if entry.form == "over":
            columns, over = (self._columns(entry, index, kind) for index in (0, 1))
            return replace(source, columns=columns, over=over) if columns and over else None
        if entry.form == "mean":
            groups = self._means(entry)
        elif entry.form == "less":
            groups = self._differences(entry)
        elif kind == "histogram":
            groups = self._histograms(entry, 0)
        else:
            each = [self._columns(entry, index, kind) for index in range(len(entry.names))]
            shown = all(each) or entry.none_beside in self.exposed
            return replace(source, columns=tuple(c for part in each for c in part)) if shown else None
        return replace(source, histograms=groups) if groups else None

    def _columns(self, entry: Entry, index: int, kind: Kind) -> tuple[int, ...]:
        """Return the columns of a name, one a label set; a histogram's sum and count are counters too."""
        name = entry.names[index]
        types = (*_NUMBERS[kind], "histogram", "summary") if name.endswith(("_sum", "_count")) else _NUMBERS[kind]
        shown = [column for column in self.columns.get(name, ()) if self.series[column].type in types]
        columns = [c for c in shown if _keeps(self.series[c].labels, entry.where[index], entry.where_not)]
        return tuple(_counted_once(columns, lambda column: self.series[column].labels, self.known))

    def _histograms(self, entry: Entry, index: int) -> tuple[HistogramColumns, ...]:
        shown = self.groups.get(entry.names[index], ())
        groups = [group for group in shown if _keeps(group.labels, entry.where[index], entry.where_not)]
        return tuple(_counted_once(groups, lambda group: group.labels, self.known))

    def _differences(self, entry: Entry) -> tuple[HistogramColumns, ...]:
        """Return the first histogram without buckets, for label sets with a sum in the second."""
        others = {group.labels: group.sum for group in self._histograms(entry, 1)}
        return tuple(
            replace(group, bounds=(), le=(), buckets=(), less=others[group.labels])
            for group in self._histograms(entry, 0)
            if group.sum >= 0 and others.get(group.labels, -1) >= 0
        )

    def _means(self, entry: Entry) -> tuple[HistogramColumns, ...]:
        counts = {self.series[column].labels: column for column in self._columns(entry, 1, "histogram")}
        return tuple(
            HistogramColumns(
                family=self.series[column].family,
                labels=self.series[column].labels,
                help=self.series[column].help,
                bounds=(),
                le=(),
                buckets=(),
                sum=column,
                count=counts[self.series[column].labels],
            )
            for column in self._columns(entry, 0, "histogram")
            if self.series[column].labels in counts
        )


def _typed(series: tuple[Series, ...]) -> tuple[Series, ...]:
    """Set the type of histograms with TYPE lines under other names than their samples.

    vLLM's `/metrics/` says `vllm:x` in the one and `vllm_x` in the other.
    """
    families = {
        labelled.name.removesuffix("_bucket")
        for labelled in series
        if labelled.type == "unknown"
        and labelled.name.endswith("_bucket")
        and any(label == "le" for label, _ in labelled.labels)
    }
    if not families:
        return series
    parts = {family + part: family for family in families for part in ("_bucket", "_sum", "_count")}
    return tuple(
        Series(
            name=labelled.name,
            labels=labelled.labels,
            family=parts[labelled.name],
            type="histogram",
            help=labelled.help,
        )
        if labelled.type == "unknown" and labelled.name in parts
        else labelled
        for labelled in series
    )


def _keeps(labels: LabelSet, where: Labels, where_not: Labels) -> bool:
    if not where and not where_not:
        return True
    value_of = dict(labels)
    return all(value_of.get(label, "") in values for label, values in where) and not any(
        value_of.get(label, "") in values for label, values in where_not
    )


def _counted_once(items: Sequence[Item], labels_of: Callable[[Item], LabelSet], known: Names) -> list[Item]:
    """Return the items without label sets that repeat another's observations: see `Names`."""
    if len(items) < 2 or not (known.ranks or known.totals):
        return list(items)
    counted = list(items)
    for total in known.totals:
        whole = {
            _without(labels, (total,))
            for labels in map(labels_of, counted)
            if not dict(labels).get(total) and any(label in known.ranks for label, _ in labels)
        }
        counted = [
            item
            for item in counted
            if not dict(labels_of(item)).get(total) or _without(labels_of(item), (total,)) not in whole
        ]
    lowest: dict[LabelSet, Ranks] = {}
    ranked = [(item, _without(labels_of(item), known.ranks), _ranks(labels_of(item), known)) for item in counted]
    for _, group, ranks in ranked:
        lowest[group] = min(lowest.get(group, ranks), ranks)
    return [item for item, group, ranks in ranked if ranks == lowest[group]]


def _without(labels: LabelSet, names: Sequence[str]) -> LabelSet:
    return tuple(pair for pair in labels if pair[0] not in names)


def _ranks(labels: LabelSet, known: Names) -> Ranks:
    shown = [dict(labels).get(label, "") for label in known.ranks]
    return tuple((int(rank) if rank.isdecimal() else -1, rank) for rank in shown)
