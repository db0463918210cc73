"""The short help of commands that load: what people type, in a sentence each; --help-all has the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts import App
from cyclopts.help import DefaultFormatter, InlineText

from sidelight.sidecar.cli.draft import LOADING

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel

ALL = "--help-all"
FLAGS = ("--help", "-h", ALL)
# Options of `run` that only --help-all shows.
RARE = frozenset(
    ("--cert", "--key", "--price", "--leave", "--reuse", "--deadline", "--workers", "--exact-tokens",
     "--ignore-eos", "--think-time", "--redact-bodies", "--metrics-ca",
     "--metrics-cert", "--metrics-key", "--metrics-token", "--metrics-user", "--metrics-header", "--metrics-insecure",
     "--metrics-timeout", "--otlp-forward", "--otlp-header", "--otlp-ca", "--listen-tls", "--listen-token",
     "--listen-client-ca", "--listen-open", "--sut", "--prometheus-header", "--trace-url")
)  # fmt: skip
EPILOGUE = (
    "Exit codes: 0 done (of report also where the run missed an objective; of watch, and scrape without --duration, "
    "also after Ctrl-C); 1 run missed an objective of --slo, or doctor found something to change between us and the "
    "engine; 2 bad usage or configuration, also a path or a port that cannot be used; 3 the target could not be "
    "reached or measured, a share of the load not be sent, or a file not be written; 130 interrupted (results up to "
    "then are written; a second signal skips that, and `sidelight report RUN` writes them later)."
)


class Brief(DefaultFormatter):
    """Formatter of panels without rare options, and with the first sentence of each of the others."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Print a panel; one whose options are all rare is left out."""
        entries = [_shortened(entry) for entry in panel.entries if not RARE & {*entry.names}]
        if entries:
            super().__call__(console, options, panel.copy(entries=entries))


def _shortened(entry: HelpEntry) -> HelpEntry:
    sentence = re.split(r"(?<=\.) (?=[A-Z0-9])", entry.description.primary_renderable.plain)[0]
    return entry.copy(description=InlineText.from_format(sentence, "plaintext"))


def choose_help(app: App, arguments: Sequence[str]) -> None:
    """Choose the help of a command line: the short one of a command that loads, unless it asks for all."""
    is_brief = arguments[:1] and arguments[0] in LOADING and ALL not in arguments
    app.help_formatter = Brief() if is_brief else None
    rest = f"All options, with what else is to know of them: sidelight {arguments[0]} {ALL}\n\n" if is_brief else ""
    app.help_epilogue = rest + EPILOGUE
