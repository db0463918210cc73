"""How numbers and tables look in a report for people."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(title: str, *columns: str, label_width: int = 20) -> Table:
    """Return an empty table: a column of labels, then these; numbers to the right, "" and "source" to the left."""
    empty = Table(title=title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    empty.add_column("", min_width=label_width)
    for column in columns:
        empty.add_column(column, justify="left" if column in {"", "source"} else "right")
    return empty


def ms(value: float | None) -> str:
    """Return milliseconds with about three digits, "-" where missing."""
    if value is None:
        return "-"
    # Adding nothing takes the sign from what rounds to zero.
    return f"{value:,.1f}" if abs(value) >= 10 else f"{round(value, 2) + 0.0:.2f}"


def percent(ratio: float | None) -> str:
    """Return a ratio in whole percent, "-" where missing."""
    return "-" if ratio is None else f"{100 * ratio:z.0f} %"


def cell(value: float | None) -> str:
    """Return a number as a table shows it: whole ones whole, others with about three digits, "-" where missing."""
    if value is None:
        return "-"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
