"""A line of an examination: its outcome and a sentence; and the printing of both."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from sidelight.rundir.printable.text import printable

# fail: no run is possible; warn: one is, with less in its report; skip: not tried. A hint says how to get what is not
# there.
OK, WARN, FAIL, SKIP = ("ok  ", "green"), ("warn", "yellow"), ("fail", "red"), ("skip", "dim")
HINT = ("    ", "dim")
WAIT_LONGER = "an exporter that found no receiver before may wait for two minutes until it tries again: --wait 2m"
ASK_ENGINE = "with --url http://ENGINE it is asked without the gateway too, which tells these apart"

Line = tuple[tuple[str, str], str]


def print_line(console: Console, mark: tuple[str, str], text: str) -> None:
    console.print(Text.assemble(mark, "  ", printable(text)), soft_wrap=True)
