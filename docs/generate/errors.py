"""Headings of docs/troubleshooting.md: the code of an error, and its sentences as they stand in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sidelight.loadgen.plan import prompts, saved, traces
from sidelight.loadgen.plan.tokenizers import fitting
from sidelight.loadgen.plan.workloads import fields
from sidelight.recorded import errors

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("correlator", "exporter", "loadgen", "methodology", "recorded", "scraper", "sidecar", "twin")
CODE = r"[a-z]+\.[a-z0-9]+(?:-[a-z0-9]+)*"
LONGEST, MOST = 7, 2  # words of a sentence in a heading, and sentences
RAISING = {"_fail"} | {
    name
    for module in (errors, prompts, saved, traces, fitting, fields)
    for name, defined in vars(module).items()
    if isinstance(defined, type) and issubclass(defined, errors.CodedError)
}
_HEADING = re.compile(rf"^\*\*`({CODE})`\*\*.*$", re.MULTILINE)


def sentences() -> dict[str, list[str]]:
    """Return the sentences of each code, in the order of the source; `…` stands for what differs.

    A code is the first argument of an error, and the sentence another one. A sentence that is passed on has none here.
    """
    found: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in RAISING:
                continue
            if code := _code(call.args[0]):
                known = found.setdefault(code, [])
                known += [said for said in map(_sentence, call.args[1:]) if said and said not in known]
    return dict(sorted(found.items()))


def with_errors(page: str) -> str:
    """Return a page with the sentences of each heading that begins with a code. Raises KeyError for an unknown code."""
    known = sentences()

    def heading(match: re.Match[str]) -> str:
        said = ", ".join(f"`{_beginning(sentence)}`" for sentence in known[match[1]][:MOST])
        return f"**`{match[1]}`**: {said}" if said else f"**`{match[1]}`**"

    return _HEADING.sub(heading, page)


def _beginning(sentence: str) -> str:
    words = sentence.split()
    return sentence if len(words) <= LONGEST else f"{' '.join(words[:LONGEST])} …"


def _code(node: ast.expr) -> str:
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return text if re.fullmatch(CODE, text) else ""


def _sentence(node: ast.expr) -> str:
    """Return a sentence with at least two words of its own, else an empty text."""
    text = re.sub(r"…(?: ?…)+", "…", " ".join("".join(_parts(node)).replace("`", "'").split()))
    return text if len(re.findall(r"\w{2,}", text)) > 1 else ""


def _parts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield from (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
