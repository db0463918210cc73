"""What the documentation is compared with: the warnings that the product can show, and the options of its commands."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs/generate"))
import mkdocs_hooks
from errors import sentences

__all__ = ["REPOSITORY", "commands", "explained", "messages", "mkdocs_hooks", "options", "sentences"]
REPOSITORY = Path(__file__).parents[1]
NOTES = {"warn", "warn_and_record", "record_note"}
# Every sentence of these functions, or where there is no name of these modules, is a warning.
WARNINGS = {
    "exporter/evaluation/warnings.py": "",
    "exporter/report/alerts.py": "",
    "exporter/report/load.py": "overload",
    "sidecar/run/phases.py": "_span_notes",
    "loadgen/requests/self_check/sentences.py": "distrust",
    "loadgen/requests/self_check/cause.py": "cause",
}
LEAST, MOST = 15, 40


def messages() -> dict[str, str]:
    """Return of each warning a phrase that does not depend on a run, by where it stands."""
    phrases: dict[str, str] = {}
    for path in sorted((REPOSITORY / "sidecar").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in NOTES:
                phrases |= _of(path, node)
    for name, function in WARNINGS.items():
        path = REPOSITORY / name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and function in {"", node.name}:
                node.body = [part for part in node.body if not _is_docstring(part)]
                phrases |= _of(path, node)
    return phrases


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of(path: Path, node: ast.AST) -> dict[str, str]:
    """Return the longest fixed part of each text below a node, cut to its first words."""
    messages = {}
    for text, line in _texts(node):
        fixed = max(re.split("\0", text), key=len).strip(" ;:,.()")
        if len(fixed) >= LEAST and " " in fixed:
            words = fixed if len(fixed) <= MOST else fixed[:MOST].rpartition(" ")[0]
            messages[f"{path.relative_to(REPOSITORY)}:{line}: {words}"] = words
    return messages


def _texts(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Give the texts below a node with their lines; NUL stands for what a run fills in."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
        yield "".join(map(str, parts)), node.lineno
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.lineno
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def options() -> dict[str, set[str]]:
    """Return the options of each command, by the generated reference: its own, and those of the groups it names."""
    reference = (REPOSITORY / "docs/reference/commands.md").read_text(encoding="utf-8")
    groups = {
        name: _flags("\n".join(re.findall(r"^- `(.+?)`:", text, re.MULTILINE)))
        for name, text in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", reference, re.MULTILINE | re.DOTALL)
    }
    sections = re.findall(r"^## sidelight ?(\w*)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL)
    return {name: _named(text, groups) | {"--help", "--help-all"} for name, text in sections}


def _named(section: str, groups: dict[str, set[str]]) -> set[str]:
    """Return the options of a command's section, with those of the groups that it takes whole or but for some."""
    listed, _, taken = section.partition("[Shared options]")
    named = _flags(listed)
    for part in taken.partition(": ")[2].split("; "):
        most, but, others = part.partition(" but ")
        links = re.findall(r"\[([^]]+)\]\(", most)
        whole = {flag for link in links for flag in groups[link]}
        named |= _flags(part) if part.startswith("of ") else whole - _flags(others if but else "")
    return named


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def explained(*pages: str) -> set[str]:
    """Return the names in backticks, and the members of paths such as `slo.objectives[].met`, of pages on metrics."""
    folder = REPOSITORY / "docs/reference/metrics"
    text = "".join((folder / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    return {name for path in re.findall(r"`([a-z0-9_.*\[\]]+)`", text) for name in re.findall(r"\w+", path)}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Give the commands of ours in a text's blocks of code, each with its arguments."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += ["\n".join(re.findall(r"^(?:    |\t)(.*)$", text, re.MULTILINE))]
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            match = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ |ExecStart=\S*/)*sidelight ([a-z]+)(.*)", line.strip())
            if match:
                yield match[1], match[2].partition(" # ")[0]
