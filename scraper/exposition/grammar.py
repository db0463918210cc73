"""The grammar of one line: a sample's name, labels and number, a HELP or TYPE line, and how names find their family.

Prometheus text 0.0.4 and 1.0.0 and OpenMetrics text, which differ in what they allow here but never contradict each
other. Whole pages are left to `text`.
Every expression is possessive (`*+`, `++`): it looks at a character once, however hostile the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

UNREADABLE = "not a sample: no readable value"
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BLANK = r"[ \t]*+"
_NAME_RE = re.compile(_NAME)
_HEAD_RE = re.compile(rf'{_BLANK}({_NAME})?{_BLANK}(\{{(?:[^"}}]++|{_STRING})*+\}})?{_BLANK}')
# A number; a time stamp and an exemplar are read over.
_TAIL_RE = re.compile(rf"{_BLANK}([^ \t]++)(?:[ \t]++-?[0-9][0-9.eE+-]*+)?(?:[ \t]++#{_BLANK}\{{.*+)?{_BLANK}")
_LABEL_RE = re.compile(rf"{_BLANK}(?:({_NAME}|{_STRING}){_BLANK}={_BLANK})?({_STRING}){_BLANK}(?:,{_BLANK}|(?=\}}))")
# What stands between the strings of labels without escapes and without quoted names.
_FIRST_KEY_RE = re.compile(rf"\{{{_BLANK}({_NAME}){_BLANK}={_BLANK}")
_NEXT_KEY_RE = re.compile(rf"{_BLANK},{_BLANK}({_NAME}){_BLANK}={_BLANK}")
_LAST_KEY_RE = re.compile(rf"{_BLANK},?{_BLANK}\}}")
_COMMENT_RE = re.compile(rf"{_BLANK}#[ \t]+(HELP|TYPE)[ \t]+({_NAME}|{_STRING})(?:[ \t]+(.*))?", re.DOTALL)
_DECLARING_RE = re.compile(rf"{_BLANK}#[ \t]+(?:HELP|TYPE)(?:[ \t]|$)")
_ESCAPE_RE = re.compile(r'\\([\\n"])')
_NOT_PLAIN_RE = re.compile(r"[^a-zA-Z0-9_]")
_TYPES = frozenset(("counter", "gauge", "histogram", "summary", "gaugehistogram", "info", "stateset"))
_SUFFIXES = {
    "histogram": ("bucket", "sum", "count"),
    "summary": ("sum", "count"),
    "gaugehistogram": ("bucket", "gsum", "gcount"),
}


@dataclass(slots=True)
class Declarations:
    """The contents of a page's HELP and TYPE lines, by metric name."""

    types: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def declarations(comments: Iterable[str]) -> Declarations:
    """Read the lines that begin with `#`; other comments are passed over.

    `aliases` lead from names in letters, digits and underscores to declared ones that have others: prometheus-client
    writes OpenMetrics samples as `vllm_x` below `# TYPE vllm:x`.
    Raises `ValueError` with the reason and the line for a HELP or TYPE line that cannot be read.
    """
    declared = Declarations()
    for comment in comments:
        if not _DECLARING_RE.match(comment):
            continue
        match = _COMMENT_RE.fullmatch(comment.rstrip(" \t\r"))
        if not match:
            raise ValueError("a HELP or TYPE line without a metric name", comment)
        what, name, text = match.groups(default="")
        name, text = unquote(name), text.strip(" \t")
        if what == "HELP":
            declared.helps[name] = _unescape(text)
        elif not text:
            raise ValueError("a TYPE line without a type", comment)
        else:
            declared.types[name] = text if text in _TYPES else "unknown"
            plain = _NOT_PLAIN_RE.sub("_", name)
            if plain != name:
                declared.aliases[plain] = name
    return declared


def family_of(name: str, declared: Declarations) -> tuple[str, str, str]:
    """Find a sample's family, type and help: its own declaration first, then that of the name without a suffix.

    Where neither is declared, a declared name that differs only in its punctuation counts (`aliases`); the family is
    named as the sample is.
    """
    declaration = _declared_as(name, declared)
    if declaration is None and declared.aliases:
        stem, _, suffix = name.rpartition("_")
        for part, ending in ((name, ""), (stem, f"_{suffix}")):
            other = declared.aliases.get(part)
            declaration = None if other is None else _declared_as(other + ending, declared)
            if other is not None and declaration is not None:
                family, kind, text = declaration
                return (part if family == other else name), kind, text
    return declaration or (name, "unknown", "")


def _declared_as(name: str, declared: Declarations) -> tuple[str, str, str] | None:
    types, helps = declared.types, declared.helps
    if name in types or name in helps:
        return name, types.get(name, "unknown"), helps.get(name, "")
    stem, _, suffix = name.rpartition("_")
    kind = types.get(stem)
    if kind is None:
        return None
    if suffix in _SUFFIXES.get(kind, ()):
        return stem, kind, helps.get(stem, "")
    # OpenMetrics declares a counter without `_total`; our names stay as exposed.
    if (kind, suffix) in (("counter", "total"), ("info", "info")):
        return name, kind, helps.get(stem, "")
    if kind in ("counter", "histogram", "summary") and suffix == "created":
        return name, "gauge", helps.get(stem, "")
    return None


def is_name(text: str) -> bool:
    """Return whether a text is a metric's name that needs no quotes."""
    return _NAME_RE.fullmatch(text) is not None


def split_sample(line: str) -> tuple[str, str, int, str]:
    """Return a sample line's name, labels with braces, offset of its number, and number's text.

    The name is empty where it stands among the labels, as in text 1.0.0. Raises `ValueError` where it is not a sample.
    """
    head = _HEAD_RE.match(line)
    name, labels = head.groups(default="") if head else ("", "")
    at = head.end() if head else 0
    if not labels and line[at : at + 1] == "{":
        raise ValueError("labels that cannot be read")
    if not name and not labels:
        raise ValueError("not a sample: no metric name")
    rest = _TAIL_RE.fullmatch(line.rstrip("\r"), at)
    if not rest or (not labels and line[at - 1] not in " \t"):
        raise ValueError(UNREADABLE)
    return name, labels, rest.start(1), rest.group(1)


def number_of(tail: str) -> float:
    """Return the number after a series text. A time stamp and an exemplar may follow it. Raises `ValueError`."""
    match = _TAIL_RE.fullmatch(tail.rstrip("\r"))
    if not match:
        raise ValueError(UNREADABLE)
    return number(match.group(1))


def number(text: str) -> float:
    """Read a number; what only Python reads (`1_000`, digits of other scripts) is refused. Raises `ValueError`."""
    if "_" in text or not text.isascii():
        raise ValueError(UNREADABLE)
    try:
        return float(text)
    except ValueError:
        raise ValueError(UNREADABLE) from None


def plain_labels(text: str, shapes: dict[str, tuple[str, ...] | None]) -> Labels | None:
    """Return labels read from their braces, None if any needs unescaping or unquoting.

    They are read where no string has an escape and no name is quoted.

    `shapes` remembers the names by what stands between the strings; a page has far fewer shapes than label texts.
    """
    if "\\" in text:
        return None
    parts = text.split('"')
    if len(parts) % 2 == 0:  # an odd number of quotes
        return None
    shape = '"'.join(parts[::2])
    if shape in shapes:
        names = shapes[shape]
    else:
        names = shapes[shape] = _label_names(parts[::2])
    if names is None:
        return None
    labels = list(zip(names, parts[1::2], strict=True))
    labels.sort()
    return tuple(labels)


def _label_names(between: list[str]) -> tuple[str, ...] | None:
    if len(between) == 1:
        return None
    matches = [(_NEXT_KEY_RE if place else _FIRST_KEY_RE).fullmatch(key) for place, key in enumerate(between[:-1])]
    names = tuple(match.group(1) for match in matches if match)
    if len(names) != len(matches) or len(set(names)) != len(names) or not _LAST_KEY_RE.fullmatch(between[-1]):
        return None
    return names


def any_labels(text: str, name: str) -> tuple[str, Labels]:
    """Read labels with their braces by the whole grammar; the first of the result is the metric's name.

    A quoted string alone is the metric's name (text 1.0.0). Raises `ValueError`.
    """
    labels: dict[str, str] = {}
    at = len(text) - len(text[1:].lstrip(" \t"))
    while text[at : at + 1] != "}":
        match = _LABEL_RE.match(text, at)
        if not match:
            raise ValueError("labels that cannot be read")
        key, value = match.group(1), unquote(match.group(2))
        if key is None:
            if name:
                raise ValueError("a label without a name")
            name = value
        else:
            label = unquote(key)
            if label in labels:
                raise ValueError(f"label {label} twice")
            labels[label] = value
        at = match.end()
    if at != len(text) - 1:
        raise ValueError("labels that cannot be read")
    if not name:
        raise ValueError("not a sample: no metric name")
    return name, tuple(sorted(labels.items()))


def unquote(text: str) -> str:
    """Take a string's quotes and escapes off; what is not quoted stays as it is."""
    return _unescape(text[1:-1]) if text[:1] == '"' else text


def _unescape(text: str) -> str:
    return _ESCAPE_RE.sub(lambda m: "\n" if m[1] == "n" else m[1], text) if "\\" in text else text
