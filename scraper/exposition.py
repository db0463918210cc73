"""Prometheus text (0.0.4, 1.0.0) and OpenMetrics text, read into a tuple of series and an array of values.

What the names mean is left to `engines`; which pages belong together, to `series`.
A page whose layout was seen before costs only its numbers: a layout is recognised by its comments and series texts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line's identity: everything on a page but its value.

    `name` is the sample's name as exposed (`x_bucket`, `x_total`); `labels` are sorted by name; `family` is the name
    without `_bucket`, `_sum`, `_count` for histograms and summaries, else the name; `type` is what the page declares,
    `unknown` if nothing.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    family: str
    type: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One parsed page: `values[i]` (float64) belongs to `series[i]`, in the order of the page, duplicates included."""

    series: tuple[Series, ...]
    values: NDArray[np.float64]


class MalformedPage(ValueError):
    """A page that is broken or cut off, at a line (from 1) and a byte (from 0: where it starts, or the page ends)."""

    def __init__(self, reason: str, *, line: int, byte: int) -> None:
        super().__init__(f"{reason} (line {line}, byte {byte})")
        self.reason = reason
        self.line = line
        self.byte = byte


_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
_STRING = rb'"(?:[^"\\]|\\.)*"'
_NAME_RE = re.compile(_NAME)
_OPEN_RE = re.compile(rb"[ \t]*\{[ \t]*")
_LABEL_RE = re.compile(
    rb"(?:(" + _NAME + rb"|" + _STRING + rb")[ \t]*=[ \t]*)?(" + _STRING + rb")[ \t]*(?:,[ \t]*|(?=\}))",
)
_VALUE_RE = re.compile(rb"[ \t]*([^ \t]+)(?:[ \t]+(-?[0-9][0-9.eE+-]*))?(?:[ \t]+#[ \t]*\{.*)?")
_COMMENT_RE = re.compile(rb"#[ \t]+(HELP|TYPE)[ \t]+(" + _NAME + rb"|" + _STRING + rb")(?:[ \t]+(.*))?", re.DOTALL)
_DECLARING_RE = re.compile(rb"#[ \t]+(?:HELP|TYPE)(?:[ \t]|$)")
_LABEL_ESCAPES = re.compile(r'\\([\\n"])')
_TYPES = frozenset(("counter", "gauge", "histogram", "summary", "gaugehistogram", "info", "stateset"))
_SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
}
_MAX_SERIES_KEPT = 200_000  # a page that invents labels on each scrape must not fill the memory
_MAX_LAYOUTS_KEPT = 256


@dataclass(slots=True)
class _Declared:
    """What one set of HELP and TYPE lines says, and the series texts and layouts seen under it."""

    types: dict[str, str]
    helps: dict[str, str]
    known: dict[bytes, Series] = field(default_factory=dict)
    layouts: dict[tuple[bytes, ...], tuple[Series, ...]] = field(default_factory=dict)


def parse(text: bytes | str, *, openmetrics: bool = False) -> Page:
    """Parse one page into its series and values, or refuse it whole.

    Timestamps and exemplars are read over. A declaration counts wherever on the page it stands, so interleaved
    families are whole. A page that a cut could not have left behind is accepted; refused with `MalformedPage` are
    - a last line without its newline, and a line that is no sample;
    - a histogram at the end of the page without its `+Inf` bucket, `_count` or `_sum`;
    - with `openmetrics`, a page without `# EOF`; always, text after `# EOF`.
    """
    page = text.encode() if isinstance(text, str) else text
    lines = page.split(b"\n")
    if b"\n " in page or b"\n\t" in page or page[:1] in (b" ", b"\t"):
        lines = [line.lstrip() for line in lines]
    comments = tuple(line for line in lines if line[:1] == b"#")
    _check_end(page, lines, comments, openmetrics=openmetrics)
    try:
        declared = _declarations(comments)
    except _BadCommentError as bad:
        raise _malformed(bad.reason, page, lines.index(bad.comment)) from None

    pairs = [line.rpartition(b" ") for line in lines if line and line[:1] != b"#"]
    heads = tuple(pair[0] for pair in pairs)
    series = declared.layouts.get(heads)
    if series is not None:
        values = _plain_values([pair[2] for pair in pairs])
        if values is not None:
            return Page(series=series, values=values)
    return _parse_lines(page, lines, declared, heads)


def bound(series: Series) -> float:
    """Return the upper bound of a histogram's `_bucket` series; NaN when it has no readable `le`."""
    for key, value in series.labels:
        if key == "le":
            try:
                return float(value)
            except ValueError:
                return math.nan
    return math.nan


def without_le(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels that tell one histogram from another of its family."""
    return tuple(label for label in labels if label[0] != "le")


def _plain_values(tails: list[bytes]) -> NDArray[np.float64] | None:
    if b"_" in b"".join(tails):  # Python reads 1_000, no exporter writes it
        return None
    try:
        return np.array(list(map(float, tails)), dtype=np.float64)
    except ValueError:
        return None


def _parse_lines(page: bytes, lines: list[bytes], declared: _Declared, heads: tuple[bytes, ...]) -> Page:
    series: list[Series] = []
    values: list[float] = []
    plain = True
    last_line = 0
    for index, raw in enumerate(lines):
        line = raw.strip()
        if not line or line[:1] == b"#":
            continue
        last_line = index
        head, _, tail = line.rpartition(b" ")
        known = declared.known.get(head)
        value = _value(tail) if known is not None else None
        if known is None or value is None:
            try:
                text, known, value = _sample(line, declared)
            except ValueError as error:
                raise _malformed(str(error), page, index) from None
            plain = plain and text == head
            if len(declared.known) > _MAX_SERIES_KEPT:
                declared.known.clear()
            declared.known[text] = known
        series.append(known)
        values.append(value)
    layout = tuple(series)
    problem = _cut_histogram(layout)
    if problem:
        raise MalformedPage(problem, line=last_line + 1, byte=len(page))
    if plain and len(layout) == len(heads):
        if len(declared.layouts) > _MAX_LAYOUTS_KEPT:
            declared.layouts.clear()
        declared.layouts[heads] = layout
    return Page(series=layout, values=np.array(values, dtype=np.float64))


def _sample(line: bytes, declared: _Declared) -> tuple[bytes, Series, float]:
    """Read one sample line by the grammar; the first part of the result is its series text."""
    named = _NAME_RE.match(line)
    name = named.group().decode() if named else ""
    at = named.end() if named else 0
    labels: dict[str, str] = {}
    opening = _OPEN_RE.match(line, at)
    if opening:
        name, at = _labels(line, opening.end(), name, labels)
    if not name:
        raise ValueError("not a sample: no metric name")
    rest = _VALUE_RE.fullmatch(line, at)
    value = _value(rest.group(1)) if rest else None
    if value is None or (not opening and line[at : at + 1] not in (b" ", b"\t")):
        raise ValueError("not a sample: no readable value")
    family, kind, text = _resolve(name, declared)
    series = Series(name=name, labels=tuple(sorted(labels.items())), family=family, type=kind, help=text)
    if kind == "histogram" and name.endswith("_bucket") and math.isnan(bound(series)):
        raise ValueError("a histogram's bucket without a readable le")
    return line[:at], series, value


def _labels(line: bytes, at: int, name: str, labels: dict[str, str]) -> tuple[str, int]:
    """Read labels from `at` through the closing brace; a quoted string alone is the metric's name (text 1.0.0)."""
    while line[at : at + 1] != b"}":
        match = _LABEL_RE.match(line, at)
        if not match:
            raise ValueError("labels that cannot be read")
        key, value = match.group(1), _unquote(match.group(2))
        if key is None:
            if name:
                raise ValueError("a label without a name")
            name = value
        else:
            label = _unquote(key) if key[:1] == b'"' else key.decode()
            if label in labels:
                raise ValueError(f"label {label} twice")
            labels[label] = value
        at = match.end()
    return name, at + 1


def _unquote(quoted: bytes) -> str:
    text = quoted[1:-1].decode()  # UnicodeDecodeError is a ValueError: the line is refused
    return _LABEL_ESCAPES.sub(_unescape, text) if "\\" in text else text


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match.group(1) == "n" else match.group(1)


def _value(text: bytes) -> float | None:
    if b"_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _resolve(name: str, declared: _Declared) -> tuple[str, str, str]:
    """Find a sample's family, type and help: its own declaration first, then that of the name without a suffix."""
    types, helps = declared.types, declared.helps
    if name in types or name in helps:
        return name, types.get(name, "unknown"), helps.get(name, "")
    stem, _, suffix = name.rpartition("_")
    kind = types.get(stem)
    if kind and f"_{suffix}" in _SUFFIXES.get(kind, ()):
        return stem, kind, helps.get(stem, "")
    # OpenMetrics declares a counter without `_total`; our names stay as exposed.
    if kind == "counter" and suffix == "total":
        return name, kind, helps.get(stem, "")
    if kind == "info" and suffix == "info":
        return name, kind, helps.get(stem, "")
    if kind in ("counter", "histogram", "summary") and suffix == "created":
        return name, "gauge", helps.get(stem, "")
    return name, "unknown", ""


class _BadCommentError(ValueError):
    def __init__(self, reason: str, comment: bytes) -> None:
        super().__init__(reason)
        self.reason = reason
        self.comment = comment


@lru_cache(maxsize=64)
def _declarations(comments: tuple[bytes, ...]) -> _Declared:
    types: dict[str, str] = {}
    helps: dict[str, str] = {}
    for comment in comments:
        if not _DECLARING_RE.match(comment):
            continue
        match = _COMMENT_RE.fullmatch(comment.rstrip(b"\r"))
        if not match:
            raise _BadCommentError("a HELP or TYPE line without a metric name", comment)
        try:
            name = _unquote(match.group(2)) if match.group(2)[:1] == b'"' else match.group(2).decode()
            text = (match.group(3) or b"").strip().decode()
        except UnicodeDecodeError:
            raise _BadCommentError("a HELP or TYPE line that is not UTF-8", comment) from None
        if match.group(1) == b"HELP":
            helps[name] = _LABEL_ESCAPES.sub(_unescape, text) if "\\" in text else text
        elif not text:
            raise _BadCommentError("a TYPE line without a type", comment)
        else:
            types[name] = text if text in _TYPES else "unknown"
    return _Declared(types=types, helps=helps)


def _check_end(page: bytes, lines: list[bytes], comments: tuple[bytes, ...], *, openmetrics: bool) -> None:
    ended = b"# EOF" in comments
    if page and lines[-1] and not (ended and lines[-1] == b"# EOF"):
        raise MalformedPage("the page is cut off: its last line has no end", line=len(lines), byte=len(page))
    if openmetrics and not ended:
        raise MalformedPage("the page is cut off: OpenMetrics without # EOF", line=len(lines), byte=len(page))
    if ended:
        after = lines.index(b"# EOF") + 1
        late = next((i for i in range(after, len(lines)) if lines[i].strip()), None)
        if late is not None:
            raise _malformed("text after # EOF", page, late)


def _cut_histogram(layout: tuple[Series, ...]) -> str:
    """Say what the last histogram lacks, if a page that ends in one lacks anything: only a cut leaves that behind."""
    if not layout or layout[-1].type != "histogram":
        return ""
    last = layout[-1]
    key = without_le(last.labels)
    group = [s for s in layout if s.family == last.family and without_le(s.labels) == key]
    bounds = [bound(s) for s in group if s.name.endswith("_bucket")]
    names = {s.name for s in group}
    lacks = []
    if math.inf not in bounds:
        lacks.append("a +Inf bucket")
    if f"{last.family}_count" not in names:
        lacks.append("a _count")
    # OpenMetrics allows no sum of what can be negative.
    if f"{last.family}_sum" not in names and not any(edge < 0 for edge in bounds):
        lacks.append("a _sum")
    if not lacks:
        return ""
    return f"the page is cut off: histogram {last.family} at its end lacks {' and '.join(lacks)}"


def _malformed(reason: str, page: bytes, index: int) -> MalformedPage:
    byte = sum(len(line) + 1 for line in page.split(b"\n")[:index])
    return MalformedPage(reason, line=index + 1, byte=byte)
