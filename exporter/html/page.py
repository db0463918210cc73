"""`report.html`: the whole run in one file that connects to nothing.

Its text and tables are those of the report for terminals and stand without a script; the script draws every request.
A content security policy allows the page's own script and styles, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from sidelight.correlator.parts import DECODE, TTFT_PARTS
from sidelight.exporter.comparison import Compared
from sidelight.exporter.document import without_controls
from sidelight.exporter.html.data import PageInputs, page_data
from sidelight.exporter.html.markup import escape
from sidelight.exporter.html.sections import comparison_sections, live_sections, sections
from sidelight.exporter.html.terms import TITLES
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.text import escaped, printable_all

STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "data.js", "plot.js", "time.js", "waterfall.js", "spread.js", "hues.js", "compare.js", "page.js")
LIVE_SCRIPTS = (*SCRIPTS[:-3], "live.js", "page.js")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{sections}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
_POLICY = "default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'"
_LIVE_POLICY = f"{_POLICY}; connect-src 'self'"


def as_html(summary: Summary, recorded: PageInputs, *, trace_url: str = "") -> str:
    """Return the page. `trace_url` is where a trace can be looked at, `{trace_id}` in it; "" for nowhere.

    Prompts and replies are never in it.
    """
    shown = without_controls(summary)
    title = f"Sidelight {'watch' if summary.watch else 'run'} {shown.run_id}"
    return as_page(title, sections(shown), page_data(summary, recorded, trace_url=trace_url))


def as_comparison(runs: Sequence[Compared], recorded: Sequence[PageInputs]) -> str:
    """Return the page of several runs: the same charts, with a curve a run."""
    data = [{"label": run.label, **page_data(run.summary, of_run)} for run, of_run in zip(runs, recorded, strict=True)]
    return as_page(f"Sidelight: {len(runs)} runs compared", comparison_sections(runs), {"runs": data})


@cache
def live_page() -> str:
    """Return the page that a browser is served while a run or a watch goes: it connects to where it came from alone."""
    return as_page("Sidelight", live_sections(), {"live": True}, scripts=LIVE_SCRIPTS, policy=_LIVE_POLICY)


def as_parts(summary: Summary, recorded: PageInputs, *, trace_url: str = "") -> dict[str, Any]:
    """Return the sections and data of `as_html`, for a page that is already open."""
    content = "\n".join(sections(without_controls(summary)))
    return {"sections": content, "data": printable_all(page_data(summary, recorded, trace_url=trace_url), escaped)}


def as_page(
    title: str,
    content: Iterable[str],
    data: Mapping[str, Any],
    *,
    styles: tuple[str, ...] = STYLES,
    scripts: tuple[str, ...] = SCRIPTS,
    policy: str = _POLICY,
) -> str:
    """Return an HTML page of these sections, with scripts that draw the data; it connects to nothing."""
    style, script = f"{_assets(styles)}\n{_part_styles()}", _assets(scripts)
    return _PAGE.format(
        policy=policy.format(style=_hash(style), script=_hash(script)),
        title=escape(title),
        style=style,
        sections="\n".join(content),
        # An element of script ends at the first "</script", whatever stands around it.
        data=json.dumps(
            {"titles": TITLES, **printable_all(data, escaped)}, allow_nan=False, separators=(",", ":")
        ).replace("<", "\\u003c"),
        script=script,
    )


@cache
def _assets(names: tuple[str, ...]) -> str:
    folder = resources.files("sidelight.exporter.html") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@cache
def _part_styles() -> str:
    """Return the colours of the parts: a variable each, by the scheme, and a class of the live panel's text."""
    coloured = (*TTFT_PARTS, DECODE)
    light = " ".join(f"--{part.name}: {part.light};" for part in coloured)
    dark = " ".join(f"--{part.name}: {part.dark};" for part in coloured)
    live = "\n".join(f".live .{part.name} {{ color: var(--{part.name}); }}" for part in TTFT_PARTS)
    in_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root:not(.paper) {{ {dark} }} }}"
    return f":root {{ {light} }}\n{in_dark}\n{live}"


def _hash(text: str) -> str:
    """Return a content security policy's name for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
