"""The command line: one function per command; an error is one line, and its class gives the exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts import App, Group
from cyclopts.config import Dict

from sidelight.recorded.errors import ConfigurationError, Interrupted, SidelightError
from sidelight.rundir.printable.errors import with_code
from sidelight.rundir.printable.masking import register_environment
from sidelight.sidecar.cli import draft, inspecting, measuring
from sidelight.sidecar.cli.arguments import translate
from sidelight.sidecar.cli.help import FLAGS, choose_help
from sidelight.sidecar.cli.messages import explained, log_to_stderr, of_systems, print_error, unexpected
from sidelight.sidecar.cli.peers import RENAMED
from sidelight.sidecar.options.config import load_yaml
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions
from sidelight.sidecar.progress.reporter import discard
from sidelight.sidecar.version import VERSION

HELP = """Load-test an LLM engine, scrape its metrics, and report for each request where its time to first token went.

Without an engine of your own:

  sidelight demo

Against your engine:

  sidelight doctor http://HOST:8000
  sidelight run http://HOST:8000 --rate 4 --duration 30s --input-tokens 512 --output-tokens 128"""

# The options of a command's configuration file, but for those of `run` and of the draft.
_OPTIONS: dict[str, type] = {"scrape": ScrapeOptions, "watch": WatchOptions}

MEASURE = Group("Measure", sort_key=1)
INSPECT = Group("Inspect", sort_key=2)

app = App(
    name="sidelight",
    help=HELP,
    help_flags=FLAGS,
    version=VERSION,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() prints a line
)
app.command(measuring.demo, group=MEASURE)
app.command(measuring.run, group=MEASURE, usage="Usage: sidelight run [OPTIONS] URL")
for _draft in draft.COMMANDS:
    _usage = f"Usage: sidelight {_draft.name} [OPTIONS] {_draft.operands}"
    app.command(_draft.function, name=_draft.name, group=MEASURE, usage=_usage)
app.command(measuring.scrape, group=MEASURE, usage="Usage: sidelight scrape [OPTIONS] [URL]")
app.command(measuring.watch, group=MEASURE, usage="Usage: sidelight watch [OPTIONS] [URL of a metrics page...]")
app.command(inspecting.simulate, group=INSPECT, help_flags=[])
app.command(inspecting.report, group=INSPECT, usage="Usage: sidelight report [OPTIONS] RUN [RUN ...]")
app.command(inspecting.capture, group=INSPECT, usage="Usage: sidelight capture [OPTIONS] RUN")
app.command(draft.PREDICT, name="predict", group=INSPECT, usage="Usage: sidelight predict [OPTIONS] RUN")
app.command(inspecting.doctor, group=INSPECT, usage="Usage: sidelight doctor [OPTIONS] URL")
app.command(inspecting.schema, group=INSPECT)
app.register_install_completion_command(help="Complete commands, options and choices in bash, zsh or fish.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code. The last resort: one line for the user, a traceback with --verbose."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in arguments
    register_environment(os.environ)
    log_to_stderr()
    try:
        translation = translate(arguments)
        arguments = translation.arguments
        if translation.implied and not {"--quiet", "--json"} & set(arguments):
            sys.stderr.write(f"sidelight: {translation.implied}\n")
        if not arguments or arguments[0].startswith("-"):
            draft.describe(app)
        choose_help(app, arguments)
        settings = _read_settings(arguments)
        verbose = verbose or settings.get("verbose") is True
        # Without a command the help is shown, and None returned.
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except cyclopts.CycloptsError as error:
        print_error(with_code(ConfigurationError("option.usage", explained(error))))
        code = ConfigurationError.exit_code
    except SidelightError as error:
        print_error(of_systems(with_code(error), arguments), trace=verbose)
        code = error.exit_code
    except KeyboardInterrupt:
        # A second signal may cut a task short that was being cancelled; of that asyncio would write a traceback.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        records = arguments[:1] != ["doctor"]
        print_error("interrupted" + ("; `sidelight report RUN` evaluates what a run had recorded" if records else ""))
        code = Interrupted.exit_code
    except BrokenPipeError:
        # The reader of our output has gone: there is nothing left to print, and nowhere to print it.
        discard(sys.stdout)
        code = 0
    except Exception as error:  # noqa: BLE001  the top of the command: one line for all, a traceback on request
        print_error(f"{unexpected(error)} [unexpected]", trace=verbose)
        code = 3
    sys.exit(code)


def _read_settings(arguments: list[str]) -> dict[str, Any]:
    """Return the values of the command's configuration file, and hand them to the parser. Empty without a file."""
    path = _config_file(arguments)
    if path is None:
        return {}
    command = arguments[0]
    options = draft.options_of(command) if command in draft.OPTIONS else _OPTIONS.get(command, RunOptions)
    settings = load_yaml(path, options, elsewhere=RENAMED)
    app.config = (Dict(settings, source=str(path), use_commands_as_keys=False),)
    return settings


def _config_file(arguments: Sequence[str]) -> Path | None:
    for position, argument in enumerate(arguments):
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None
