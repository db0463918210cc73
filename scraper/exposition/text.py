"""Parser of Prometheus text (0.0.4, 1.0.0) and OpenMetrics pages.

A page is read into a tuple of series and an array of values. The grammar of one line is left to `grammar`; pages of one
target that follow each other, to `reader`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import msgspec
import numpy as np

from sidelight.rundir.columns import Floats
from sidelight.scraper.exposition import grammar
from sidelight.scraper.exposition.page import (
    MAX_LINE_CHARACTERS,
    MAX_LINES,
    MAX_SERIES,
    MalformedPage,
    Page,
    Series,
    bound,
    without_le,
)

_NO_END = "the page is cut off: its last line has no end"
_JSON_NUMBERS = msgspec.json.Decoder(list[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A page with its lines: `heads[i]` is what stands before the number of line i, empty where it has none."""

    page: Page
    lines: list[str]
    heads: list[str]


def parse(text: bytes | str, *, openmetrics: bool = False) -> Page:
    """Parse one page into its series and values, or refuse it whole.

    Timestamps and exemplars are ignored. A declaration counts wherever on the page it is, so families may be
    interleaved. Refused with `MalformedPage`, because a truncated page could look like it, are
    - a last line without its newline, and a line that is not a sample;
    - a histogram at the end of the page without its `+Inf` bucket, `_count` or `_sum`;
    - with `openmetrics`, a page without `# EOF`; always, text after `# EOF`;
    - what is not UTF-8;
    - more than `MAX_SERIES` series or `MAX_LINES` lines, and a line of more than `MAX_LINE_CHARACTERS`.
    """
    return read_lines(text if isinstance(text, str) else decode(text), openmetrics=openmetrics).page


def decode(body: bytes) -> str:
    """Decode a page, or refuse it at the line that is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        if error.reason == "unexpected end of data":  # a letter cut in two
            raise MalformedPage(_NO_END, line=line, byte=len(body)) from None
        start = body.rfind(b"\n", 0, error.start) + 1
        raise MalformedPage("not UTF-8", line=line, byte=start) from None


def read_lines(text: str, *, openmetrics: bool) -> Lines:
    """Do the work of `parse`, and keep the lines."""
    _check_size(text)
    _check_end(text, openmetrics=openmetrics)
    lines = text.split("\n")
    if len(max(lines, key=len)) > MAX_LINE_CHARACTERS:
        index = next(i for i, line in enumerate(lines) if len(line) > MAX_LINE_CHARACTERS)
        raise _malformed(f"a line of more than {MAX_LINE_CHARACTERS} characters", lines, index)
    if "# EOF" in text:
        _check_after_end(lines)
    indented = "\n " in text or "\n\t" in text or text[:1] in (" ", "\t")
    comments = [line for line in lines if (line.lstrip(" \t") if indented else line)[:1] == "#"]
    try:
        declared = grammar.declarations(comments)
    except ValueError as bad:
        reason, comment = bad.args
        raise _malformed(reason, lines, lines.index(comment)) from None
    listed, heads, numbers = _samples(lines, _Known(declared))
    values = _values(numbers, heads, lines)
    series = tuple(listed)
    problem = _cut_histogram(series)
    if problem:
        last = max(index for index, head in enumerate(heads) if head)
        raise MalformedPage(problem, line=last + 1, byte=len(text.encode()))
    return Lines(page=Page(series=series, values=values), lines=lines, heads=heads)


class _Known:
    """Names and labels of the lines of one page read so far, by their texts."""

    def __init__(self, declared: grammar.Declarations) -> None:
        self.declared = declared
        self.families: dict[str, tuple[str, str, str, bool]] = {}  # by valid name; the last: a histogram's bucket
        self.labels: dict[str, grammar.Labels] = {"": ()}  # by valid text, braces included
        self.with_le: set[str] = set()  # label texts in which a bucket's bound can be read
        self.shapes: dict[str, tuple[str, ...] | None] = {}

    def learn(self, line: str, name: str, text: str, tail: str) -> tuple[str, str, str, str] | None:
        """Return a new line's name, the key of its labels, its head and its number.

        New are its name or its labels.

        `name`, `text` (the labels) and `tail` are what the last space and the first brace divide the line into,
        mostly right. None where the line is blank or an indented comment. Raises `ValueError` where it is not a sample.
        """
        valid = grammar.is_name(name)
        labels = self.labels.get(text) if valid else None
        if labels is None and valid:
            labels = grammar.plain_labels(text, self.shapes)
        if labels is not None:
            head, number = line[: len(line) - len(tail)], tail
        elif not line.strip() or line.lstrip(" \t").startswith("#"):
            return None
        else:
            outer, text, at, number = grammar.split_sample(line)
            name, labels = grammar.any_labels(text, outer) if text else (outer, ())
            head = line[:at]
            text = text if outer else f" {head}"  # a text that holds the name as well belongs to this metric alone
        self.labels[text] = labels
        if name not in self.families:
            family, kind, about = grammar.family_of(name, self.declared)
            self.families[name] = family, kind, about, kind == "histogram" and name.endswith("_bucket")
        return name, text, head, number

    def check_le(self, text: str) -> None:
        """Raise ValueError for a bucket's labels with an unreadable bound."""
        if math.isnan(bound(self.labels[text])):
            raise ValueError("a histogram's bucket without a readable le")
        self.with_le.add(text)


def _samples(lines: list[str], known: _Known) -> tuple[list[Series], list[str], list[str]]:
    """Read the sample lines: series and number texts, one of each a sample, and heads, one a line."""
    series: list[Series] = []
    heads: list[str] = []
    numbers: list[str] = []
    families, labels_of, with_le = known.families, known.labels, known.with_le
    for index, line in enumerate(lines):
        if not line or line[0] == "#":
            heads.append("")
            continue
        head, space, tail = line.rpartition(" ")
        head += space
        brace = head.find("{")
        name, text = (head[:-1], "") if brace < 0 else (head[:brace], head[brace:-1])
        try:
            if name not in families or text not in labels_of:
                parsed = known.learn(line, name, text, tail)
                if parsed is None:
                    heads.append("")
                    continue
                name, text, head, tail = parsed
            family, kind, about, bucket = families[name]
            if bucket and text not in with_le:
                known.check_le(text)
        except ValueError as error:
            raise _malformed(str(error), lines, index) from None
        series.append(Series(name, labels_of[text], family, kind, about))
        heads.append(head)
        numbers.append(tail)
    return series, heads, numbers


def _values(numbers: list[str], heads: list[str], lines: list[str]) -> Floats:
    try:
        return plain_numbers(numbers)
    except ValueError:
        places = [index for index, head in enumerate(heads) if head]
        for index, text in zip(places, numbers, strict=True):
            try:
                grammar.number(text)
            except ValueError as error:
                raise _malformed(str(error), lines, index) from None
        raise


def plain_numbers(texts: list[str]) -> Floats:
    """Read numbers all at once, or raise `ValueError` if `grammar.number` refuses one of them.

    As one JSON array where they are JSON's (a fifth of the time of `float`, and as exact); NaN and +Inf are not.
    """
    joined = ",".join(texts)
    if "-0," not in joined and not joined.endswith("-0"):  # JSON's integers have no negative zero
        try:
            numbers = _JSON_NUMBERS.decode(f"[{joined}]")
        except msgspec.DecodeError:
            numbers = []
        if len(numbers) == len(texts):
            return np.array(numbers, dtype=np.float64)
    if "_" in joined or not joined.isascii():
        raise ValueError(grammar.UNREADABLE)
    return np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))


def _check_size(text: str) -> None:
    lines = text.count("\n")
    samples = lines - text.count("\n#") - text.startswith("#")
    if samples > MAX_SERIES or lines > MAX_LINES:
        limit = f"{MAX_SERIES} series" if samples > MAX_SERIES else f"{MAX_LINES} lines"
        raise MalformedPage(f"more than {limit}", line=lines, byte=len(text.encode()))


def _check_end(text: str, *, openmetrics: bool) -> None:
    lines = text.count("\n") + 1
    if text and text[-1] != "\n" and text[text.rfind("\n") + 1 :].rstrip("\r") != "# EOF":
        raise MalformedPage(_NO_END, line=lines, byte=len(text.encode()))
    if openmetrics and not re.search(r"^# EOF\r*$", text, re.MULTILINE):
        raise MalformedPage("the page is cut off: OpenMetrics without # EOF", line=lines, byte=len(text.encode()))


def _check_after_end(lines: list[str]) -> None:
    end = next((index for index, line in enumerate(lines) if line.rstrip("\r") == "# EOF"), len(lines))
    late = next((index for index in range(end + 1, len(lines)) if lines[index].strip()), None)
    if late is not None:
        raise _malformed("text after # EOF", lines, late)


def _cut_histogram(series: tuple[Series, ...]) -> str:
    """Return the missing parts of a page's last histogram as a message, "" if complete.

    The page ends in that histogram; only a cut leaves that behind.
    """
    if not series or series[-1].type != "histogram":
        return ""
    last = series[-1]
    key = without_le(last.labels)
    group = [member for member in series if member.family == last.family and without_le(member.labels) == key]
    bounds = [bound(member.labels) for member in group if member.name.endswith("_bucket")]
    names = {member.name for member in group}
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


def _malformed(reason: str, lines: list[str], index: int) -> MalformedPage:
    return MalformedPage(reason, line=index + 1, byte=sum(len(line.encode()) + 1 for line in lines[:index]))
