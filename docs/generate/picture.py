"""Write docs/generate/report.svg, the picture of the README, from a run: its command, conclusion and breakdown.

python docs/generate/picture.py RUN
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).with_name("report.svg")
WIDTH = 104
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"


def excerpt(report: str) -> str:
    """Return a report's beginning, and of its tables the breakdown."""
    beginning = report.partition("\nClient\n")[0]
    breakdown = report.partition("Where the TTFT went")[2].partition("\nSlowest requests")[0]
    return f"{beginning}\nWhere the TTFT went{breakdown.rstrip()}"


def styled(line: str) -> Text:
    """Return a line as it is shown: alerts and what to do stand out, bars are coloured."""
    text = Text(line)
    text.highlight_regex(r"█+", "cyan")
    text.highlight_regex(r"^(! \w+|What to do:)", "bold yellow")
    text.highlight_regex(r"^(TTFT was .*|Of the mean, .*|Where the TTFT went)", "bold")
    return text


def main() -> int:
    """Draw the run that the command line names."""
    run = Path(sys.argv[1])
    command = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["command"]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ sidelight {' '.join(command)}\n", style="green"))
    for line in excerpt((run / "report.txt").read_text(encoding="utf-8")).splitlines():
        console.print(styled(line))
    drawn = console.export_svg(title="sidelight", theme=MONOKAI, unique_id="sidelight")
    # A picture in a README loads no fonts from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
