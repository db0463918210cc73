"""Write docs/generate/report.svg, the picture of the README, from a run: its command, verdict and breakdown.

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

from sidelight.exporter.report.sections import sections
from sidelight.exporter.text import render
from sidelight.sidecar.report.derive import evaluated

PICTURE = Path(__file__).with_name("report.svg")
WIDTH = 104
SHOWN = ("heading", "verdict", "alerts", "objectives", "timeline", "parts")  # of the report
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"


def main() -> int:
    """Draw the run that the command line names."""
    run = Path(sys.argv[1])
    command = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["command"]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ sidelight {' '.join(command)}\n", style="green"))
    content = sections(evaluated(run).summary)
    console.print(render(block for name in SHOWN for block in content[name]))
    drawn = console.export_svg(title="sidelight", theme=MONOKAI, unique_id="sidelight")
    # A picture in a README loads no fonts from elsewhere.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
