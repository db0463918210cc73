"""The list of rooms in architecture.md: packages and folders by the first sentence of their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "rundir", "loadgen", "scraper", "recorded", "correlator", "twin", "exporter", "sidecar", "methodology", "simulator",
)  # fmt: skip
BEGIN, END = "<!-- rooms -->", "<!-- end of rooms -->"


def with_rooms(text: str) -> str:
    """Return a page with its list of rooms written again. Raises ValueError for a page without one."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no list of rooms: {BEGIN} and {END}")
    rows = "\n".join(_rows())
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


def _rows() -> Iterator[str]:
    for package in PACKAGES:
        yield f"- **{package}/**: {_sentence(ROOT / package / '__init__.py')}"
        for path in sorted((ROOT / package).iterdir()):
            if path.is_dir() and (path / "__init__.py").exists():
                yield f"  - `{path.name}/`: {_sentence(path / '__init__.py')}"


def _sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return docstring.partition(". ")[0].removesuffix(".")
