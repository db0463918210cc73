"""What a wheel has beside its modules: the manual page; and, out of a source distribution, what links are here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SUMMARY = "load\\-test an LLM server, and say where its time to first token went"
REFERENCE = "docs/reference/commands.md"
MARKS = (
    (r"\[([^\]]+)\]\(\S*?\)", r"\1"),  # a link is its words
    (r"`([^`]+)`", r"\\fB\1\\fR"),
    (r"^- \\fB(.+?)\\fR: ", r".TP\n\\fB\1\\fR\n"),  # an option
    (r"^- ", r".IP \\(bu 2\n"),
    (r"^### (.+)$", r".SS \1"),
    (r"^## sidelight ?(.*)$", r".SH sidelight \1"),
    (r"^## (.+)$", r".SH \1"),
)


class ManualPage(BuildHookInterface):
    """Hatchling's hook that adds to a wheel; without the reference, as in the image, there is no manual page."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the page where the wheel is built, and name folders that a source distribution has no links to."""
        for package in (path.parent for path in Path(self.root).glob("*/__init__.py")):
            if package.name != "sidelight" and not (package.parent / "sidelight" / package.name).exists():
                build_data["force_include"][str(package)] = f"sidelight/{package.name}"
        reference = Path(self.root) / REFERENCE
        if version == "editable" or not reference.is_file():
            return
        page = Path(self.directory) / "sidelight.1"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(manual(reference.read_text(encoding="utf-8"), self.metadata.version), encoding="utf-8")
        build_data["shared_data"][str(page)] = "share/man/man1/sidelight.1"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact: str) -> None:
        """Remove the page: the wheel has it."""
        (Path(self.directory) / "sidelight.1").unlink(missing_ok=True)


def manual(reference: str, version: str) -> str:
    """Return the reference, in Markdown, as a manual page in roff."""
    _, *sections = re.split(r"^(?=## )", reference, flags=re.MULTILINE)
    pieces = re.split(r"^```\n(.*?)^```\n", "".join(sections).replace("\\", "\\e"), flags=re.MULTILINE | re.DOTALL)
    for position, piece in enumerate(pieces):
        pieces[position] = f".nf\n{piece}.fi\n" if position % 2 else _marked(piece)
    text = re.sub(r"\n{2,}", "\n.PP\n", "".join(pieces)).replace("-", "\\-")
    return f'.TH SIDELIGHT 1 "" "Sidelight {version}"\n.SH NAME\nsidelight \\- {SUMMARY}\n{text}'


def _marked(text: str) -> str:
    for pattern, replacement in MARKS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text
