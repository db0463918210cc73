"""Progress of a run on standard error: a live panel on a terminal, a line every few seconds elsewhere, JSON lines for
machines, or nothing.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import IO, Literal, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sidelight.rundir.printable.masking import without_secrets_all
from sidelight.rundir.printable.text import IN_ASCII, printable
from sidelight.sidecar.progress.panel import View, line, panel

Mode = Literal["panel", "lines", "json", "quiet"]
LINE_EVERY_S = 5.0
MOST_REMEMBERED = 1000  # warnings, the latest: a watch goes on for months


def is_terminal(stream: IO[str]) -> bool:
    """Return whether a stream can show a panel: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def mode_for(*, quiet: bool, as_json: bool, stream_is_terminal: bool) -> Mode:
    if as_json:
        return "json"
    if quiet:
        return "quiet"
    return "panel" if stream_is_terminal else "lines"


class Terminal(Console):
    """Standard output or standard error; when its reader has gone, as in `| head`, it falls silent.

    Rich would end the process with 1, in the middle of a run and as if an objective had been missed. What the
    terminal's encoding lacks is written in ASCII.
    """

    def __init__(self, *, stderr: bool = False, highlight: bool = True) -> None:
        super().__init__(stderr=stderr, highlight=highlight)
        if isinstance(self.file, TextIOWrapper):
            self.file.reconfigure(errors=IN_ASCII)

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on; what the stream still buffers goes there too."""
        self.quiet = True
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Redirect a stream's remaining output to nowhere."""
    with suppress(OSError, ValueError):  # ValueError: a stream without a file, or a closed one
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress:
    """Standard error during a run. A context manager: the panel is removed when it ends."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.console = Terminal(stderr=True, highlight=False)
        self._live: Live | None = None
        self._width = 0
        self._last_line_s = -LINE_EVERY_S
        self._last_phase = ""
        self._silent: Mapping[str, str] = {}
        self.warned = deque[str](maxlen=MOST_REMEMBERED)
        self.study = ""  # how far a study is that the run belongs to; it stands above the panel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the panel; later stages and results are printed where it was."""
        if self._live is not None:
            with self._read():
                self._live.update(Text(""), refresh=True)  # of a panel higher than the terminal, the rest would stay
                self._live.stop()
            self._live = None

    def stage(self, text: str) -> None:
        if self.mode == "json":
            self._json({"event": "stage", "stage": text})
        elif self.mode != "quiet":
            self._print(Text(f"  {printable(text)}", style="dim"))

    def warn(self, text: str) -> None:
        """Print a warning, also with --quiet, and remember it; of a study's steps, the same one once."""
        is_repeated = bool(self.study) and text in self.warned
        self.warned.append(text)
        if self.mode == "json":
            self._json({"event": "warning", "text": text})
        elif not is_repeated:
            self._print(Text(f"! {printable(text)}", style="yellow"))

    def show(self, renderable: RenderableType) -> None:
        """Draw the panel, in place of the one before; in other modes, and on a terminal that is held up, nothing."""
        if self.mode != "panel" or self.console.quiet or not self._is_writable():
            return
        with self._read():
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=True)
                self._live.start()
            width = self.console.size.width
            if width < self._width:  # the terminal has broken the lines of the last panel, which cannot be counted
                self.console.clear()
            self._width = width
            self._live.update(renderable, refresh=True)

    def _is_writable(self) -> bool:
        """Return whether the terminal takes output now. One that is stopped (Ctrl-S) would stop its writer."""
        try:
            return bool(select.select([], [self.console.file], [], 0)[1])
        except (OSError, ValueError):  # a stream without a file, as in tests; one that is closed
            return True

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Write while somebody reads; a terminal that has gone ends nothing."""
        try:
            yield
        except OSError:
            self.console.on_broken_pipe()

    def update(self, view: View) -> None:
        """Show the latest numbers; warn once when a page stops answering, and once when it answers again."""
        self._warn_of_silence(view.silent)
        if self.mode == "json":
            self._json(
                {"event": "progress", **({"study": self.study} if self.study else {}), **msgspec.to_builtins(view)}
            )
        elif self.mode == "panel":
            self.show(Group(Text(self.study, style="bold"), panel(view)) if self.study else panel(view))
        elif self.mode == "lines" and (
            view.phase != self._last_phase or view.elapsed_s - self._last_line_s >= LINE_EVERY_S
        ):
            self._last_phase = view.phase
            self._last_line_s = view.elapsed_s
            self._print(f"  {self.study}{': ' if self.study else ''}{line(view)}")

    def _print(self, text: RenderableType) -> None:
        with self._read():
            self.console.print(text, soft_wrap=True)

    def _warn_of_silence(self, silent: Mapping[str, str]) -> None:
        for url, reason in silent.items():
            if url not in self._silent:
                self.warn(f"{url} has not answered {reason}")
        for url in self._silent:
            if url not in silent:
                self.warn(f"{url} answers again")
        self._silent = silent

    def done(self, directory: str, status: str) -> None:
        """Print the path of the results, for machines; a person reads the report."""
        if self.mode == "json":
            self._json({"event": "done", "directory": directory, "status": status})

    def _json(self, message: dict[str, object]) -> None:
        try:
            sys.stderr.write(json.dumps(without_secrets_all(message)) + "\n")
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr)
