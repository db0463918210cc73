"""Parsers of what options say, and of the small files that studies and watches leave for those who go on with them."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from unittest import mock

import msgspec
from faults.parsers import Parser, file_of, files, studies
from golden_files import GOLDEN

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.methodology.execution import asking
from sidelight.methodology.execution.data import step_data
from sidelight.methodology.execution.record import (
    ALL,
    LOG,
    STUDY,
    Decided,
    Judged,
    StepEnded,
    StepStarted,
    Stopped,
    open_study,
    read_all,
)
from sidelight.methodology.measures.looks import parse_until
from sidelight.methodology.options import StudyOptions, SweepOptions
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import Step
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.framing import Framer
from sidelight.rundir.printable import masking
from sidelight.rundir.printable.text import defused, printable_json, printable_lines
from sidelight.sidecar.options import access
from sidelight.sidecar.options.checks import extra_of
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.options.load import RunOptions
from sidelight.simulator.__main__ import main as simulate

Text = Callable[[str], object]
NOW_NS = 1_800_000_000_000_000_000


def texts(*examples: str) -> Callable[[], list[bytes]]:
    """Return what gives these examples of an option."""
    return lambda: list(map(os.fsencode, examples))


def option(read: Text) -> Callable[[bytes, random.Random, Path], object]:
    """Return what reads an input as a word of a command line, which no NUL can be in."""
    return lambda data, _, __: read(os.fsdecode(data.replace(b"\0", b"")))


def guardrails(text: str) -> None:
    """Read options of `simulate`, which then cannot write its file and serves nothing."""
    words = text.split()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):  # of argparse
        simulate([*words, "--truth", f"{os.devnull}/none"])


def header_file(path: Path) -> None:
    with mock.patch.object(access, "register_headers"):  # which keeps each for as long as the process lives
        access.require_headers("--header", (f"@{path}",))


def variants(text: str) -> None:
    with mock.patch.object(asking, "register_command"):  # as above
        options = StudyOptions(variant=(text,))
        as_recorded(options)
        asking.variants_of(options)


def extra_body(text: str) -> None:
    options = RunOptions(extra_body=text)
    as_recorded(options)
    extra_of(options)


@cache
def records() -> list[bytes]:
    """Return the records of a study of one step."""
    step = Step(kind="level", label="open-70-percent", load="open", level=4.0, duration=6.0, seed=1, share=0.7)
    judged = outcome(step, step_data(GOLDEN / "vllm_plain"), ("ttft",))
    frames = (
        Decided(at_ns=NOW_NS, number=1, step=step),
        StepStarted(at_ns=NOW_NS, number=1, run="steps/0001-open-70-percent", notes=("busy",)),
        StepEnded(at_ns=NOW_NS + 1, number=1, status="complete"),
        Judged(at_ns=NOW_NS + 1, number=1, outcome=judged),
        Stopped(at_ns=NOW_NS + 2, status="complete", reason="all requests were sent"),
    )
    return [msgspec.msgpack.encode(frame) for frame in frames]


def steps(data: bytes, rng: random.Random, place: Path) -> None:
    """Read a log of steps with a record of these bytes among others, or bytes behind them; decide what follows."""
    framer, known = Framer(), records()
    at = rng.randrange(len(known))
    with suppress(FileExistsError):
        (place / "study").mkdir()
        (place / "study" / STUDY).write_bytes(studies()[0])
    payloads = [*known[:at], data, *known[at + rng.randrange(2) :]]
    log = b"".join(framer.frame(payload) for payload in payloads if payload)
    (place / "study" / LOG).write_bytes(log if rng.random() < 0.9 else log + data)
    study = open_study(place / "study")
    decide(PROCEDURES["ttft"], study.record.asked, study.finished)


def all_of(data: bytes, _: random.Random, place: Path) -> None:
    (place / ALL).write_bytes(data)
    asking.from_record(read_all(place), StudyOptions())


@cache
def options_of_all() -> list[bytes]:
    """Return what all tests were asked with, as it is written."""
    asked = StudyOptions(url=("http://x",), scale="short", slo="ttft_p99<500ms", variant=('{"off": "http://y"}',))
    return [msgspec.json.encode({"schema_version": 1, "options": as_recorded(asked)})]


def shown(text: str) -> None:
    """Show a text in every way, and take secrets from it as from a command, a URL, a user and a header."""
    with mock.patch.dict(masking._KNOWN):
        masking.register_command(text)
        masking.register_url(text)
        masking.register_user(text)
        masking.register_headers([(text, text), ("Authorization", text)])
    for show in (masking.masked_command, masking.masked_body, printable_lines, printable_json, defused):
        show(text)


OPTION_PARSERS: dict[str, Parser] = {
    "steps": Parser(corpus=records, read=steps, declared=(ConfigurationError,)),
    "all-tests": Parser(corpus=options_of_all, read=all_of, declared=(ConfigurationError,)),
    "header-file": Parser(
        corpus=files("headers"), read=file_of(".txt", read=header_file), declared=(ConfigurationError,)
    ),
    "variants": Parser(corpus=files("variants"), read=option(variants), declared=(ConfigurationError,)),
    "extra-body": Parser(
        corpus=texts('{"top_k": 1, "guided": {"regex": "a+", "token": "s3cret-s3cret"}}', "{}", '{"a": "\udcff"}'),
        read=option(extra_body), declared=(ConfigurationError,),
    ),
    "guardrails": Parser(
        corpus=texts(
            "--guard-input 30:50 --guard-output 50:40 --guard-refuse 0.01",
            "--drift 5%/h --slow 2 --oom-at 64 --fail-above 200 --policy fcfs",
        ),
        read=option(guardrails),
    ),
    "shown": Parser(corpus=files("commands"), read=option(shown)),
    "slo": Parser(
        corpus=texts("ttft_p99<500ms,e2e_mean<=2s,error_rate<1%", "itl_max<0.1s, throughput>5"),
        read=option(parse_slo), declared=(ValueError,),
    ),
    "until": Parser(corpus=texts("ttft_p99±10%", "ttft_p50+-5%"), read=option(parse_until), declared=(ValueError,)),
    "vary": Parser(
        corpus=texts("input-tokens=512,4096", 'extra-body={"a": 1}|{"a": 2}'),
        read=option(lambda text: SweepOptions(varied=(text,)).vary), declared=(ConfigurationError,),
    ),
}  # fmt: skip
