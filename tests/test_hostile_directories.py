"""Directories that an attacker made: what is said of them, and that nothing else is written, followed or obeyed."""

from __future__ import annotations

import csv
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_files
import msgspec
import pytest
from faults.cases import cpu_limit
from sent_requests import parts
from tiny_study import TINY

from sidelight.loadgen.records import RequestPart
from sidelight.methodology.execution.record import (
    LOG,
    Decided,
    Frame,
    Judged,
    StepEnded,
    StepStarted,
    StudyRecord,
    append,
    create,
)
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import Outcome, Parameters, Step, StudySettings
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.framing import MOST_INFLATED_BYTES
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import LayoutRecord, RowRecord
from sidelight.sidecar.cli.app import main
from sidelight.sidecar.formats import FORMATS

ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e\x9b"
FORMULA = "=cmd|' /C calc'!A0"
OBEYED = set("\x1b\x07\u202e\x9b\x00\u2028")
# What moves a cursor, turns text round or has no width; a line's end is the only one of them that a file may have.
UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
NUMBER = re.compile(r"[+-][\d.einf]+(=.*)?", re.IGNORECASE)  # the bound of a bucket, too
MOST_CPU_S = 10.0
BINARY = (".parquet", ".log")


def ran(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return int(ended.value.code or 0)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory with a file in it, to which links lead."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "mine").write_text("mine")
    return path


def unharmed(victim: Path) -> bool:
    return [("mine", "mine")] == [(path.name, path.read_text()) for path in victim.iterdir()]


def obeyed(path: Path) -> list[str]:
    """Return the files of people in a directory that hold what a terminal or a browser obeys."""
    files = [file for file in path.rglob("*") if not file.is_symlink()]
    texts = [file for file in files if file.suffix in {".txt", ".html", ".md", ".csv"}]
    return [file.name for file in texts if OBEYED & set(file.read_text(encoding="utf-8"))]


@pytest.fixture
def attackers(tmp_path: Path, victim: Path) -> Path:
    """A recorded run with links, FIFOs, bombs and escapes wherever one can be."""
    path = golden_files.copied("vllm_plain", tmp_path)
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    manifest["config"] |= {"model": f"m{ESCAPES}{FORMULA}", "formats": ["text", "html", "markdown", "csv"]}
    manifest["config"] |= {
        "out": str(victim),
        "trace_url": "javascript:alert(1)//{trace_id}",
    }
    manifest["target"] = {**manifest.get("target", {}), "version": f"<script>alert(1)</script>{ESCAPES}"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    raw = path / "raw"
    for name in ("summary.json", "report.txt", "report.html", "report.md", "requests.parquet", "timeslices.parquet"):
        (path / name).symlink_to(victim / "mine")
    (raw / "hardware-1.log").symlink_to("/dev/zero")
    (raw / "spans-1.log").symlink_to("/dev/urandom")
    os.mkfifo(raw / "requests-1.log")
    (raw / "timings-1.log").mkdir()
    (raw / f"requests-{ESCAPES}.log").write_bytes(b"\xf5SLr" * 1000)
    (path / f"{ESCAPES}[bold red]name.txt").touch()
    bomb = zlib.compress(bytes(MOST_INFLATED_BYTES + 1), 1)
    with FrameLog(raw / "requests-2.log") as log:
        log.append(msgspec.msgpack.encode(RequestPart(index=10**6, last=True, body=bomb)))
    with FrameLog(raw / "requests-3.log") as log:
        other = msgspec.structs.replace(parts(7, 1)[-1], url=f"http://{ESCAPES}/", index=9**9)
        log.append(msgspec.msgpack.encode(other))
    with FrameLog(raw / "scrapes-1.log") as log:
        log.append(msgspec.msgpack.encode(LayoutRecord(id=0, url="http://x", series=bomb)))
    with FrameLog(raw / "scrapes-2.log") as log:
        log.append(*hostile_page(manifest["started_ns"]))
    return path


def hostile_page(began_ns: int) -> Iterator[bytes]:
    """Give the records of a page that is scraped twice a second, with formulas and escapes wherever it has a text."""
    labels = (("=a", FORMULA), ("b", f"@SUM(1){ESCAPES}"), ("model_name", "-2+3"), (f"{ESCAPES}<img>", "\t=1"))
    series = [
        Series(name, labels, name, "gauge", f"{help_}{ESCAPES}<script>alert(1)</script>")
        for name, help_ in (("vllm:num_requests_running", FORMULA), (f"=g{ESCAPES}", "+1"), ("-g", "@"))
    ]
    packed = zlib.compress(msgspec.msgpack.encode(series))
    yield msgspec.msgpack.encode(LayoutRecord(id=0, url=f"http://=h/{ESCAPES}{FORMULA}", series=packed))
    for number in range(120):
        at_ns = began_ns + number * 500_000_000
        row = RowRecord(layout=0, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns + 1, delta=b"")
        yield msgspec.msgpack.encode(row)


def test_a_run_of_an_attacker_is_reported_and_obeyed_in_nothing(
    attackers: Path, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its damage is the verdict; links are replaced by our files, the file that they lead to stays; and so it is
    where it is compared.
    """
    assert 3 == ran("report", attackers)
    said = capsys.readouterr()
    assert "Not to be trusted: recorded data are missing or damaged" in said.out
    assert "Why: raw/hardware-1.log: it is damaged" in said.out
    for reason in ("is a link", "unpacks to more than", "is not a regular file"):
        assert reason in " ".join(said.out.split())
    assert (1, set()) == (said.err.count("\n"), OBEYED & set(said.out + said.err))
    page = (attackers / "report.html").read_text()
    assert "<script>alert" not in page
    assert '"javascript:' not in page
    other = golden_files.copied("two_engines", tmp_path)
    assert 0 == ran("report", attackers, other, "--output", tmp_path / "both.html")
    said = capsys.readouterr()
    assert not OBEYED & set(said.out + said.err)
    assert "<script>alert" not in (tmp_path / "both.html").read_text()
    assert [] == obeyed(attackers) == obeyed(tmp_path)
    assert unharmed(victim)


def everything(root: Path, *without: Path) -> dict[str, object]:
    """Return all that lies in a directory, but in some of it: modes, where links lead to and what files hold."""
    seen: dict[str, object] = {}
    for path in root.rglob("*"):
        if any(path.is_relative_to(other) for other in without):
            continue
        holds = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        seen[str(path)] = (path.lstat().st_mode, path.readlink() if path.is_symlink() else holds)
    return seen


def formulas(path: Path) -> list[str]:
    """Return the cells of a table that a spreadsheet would compute."""
    cells = [cell for row in csv.reader(path.read_text().splitlines()) for cell in row]
    return [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@")) and not NUMBER.fullmatch(cell)]


@pytest.mark.parametrize("command", ["report", "page", "base", "compare"])
def test_no_command_takes_long_writes_elsewhere_or_shows_a_control(
    attackers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
):
    """Of an attacker's run alone with every format, of a page of two runs, beside another, and in a comparison: 10 s of
    the processor are enough, and only the directory that is named for it changes.
    """
    other, out = golden_files.copied("vllm_spans", tmp_path), tmp_path / "out"
    (tmp_path / "here").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arguments: tuple[object, ...]
    if command == "report":
        arguments, out = ("report", attackers, "--formats", ",".join(FORMATS)), attackers
    elif command == "page":
        arguments = ("report", attackers, other, "--output", out / "page.html")
    elif command == "base":
        arguments, out = ("report", other, "--base", attackers, "--formats", ",".join(FORMATS)), other
    else:
        arguments, out = ("compare", attackers, other, "--anyway", "--out", out / "study"), out / "study"
    before = everything(tmp_path, out)
    with cpu_limit(MOST_CPU_S):
        code = ran(*arguments)
    said = capsys.readouterr()
    assert code in (0, 3), said.err
    assert [] == UNSEEN.findall(said.out + said.err)
    assert before == everything(tmp_path, out)
    files = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix not in BINARY]
    shown = {path.name: path.read_text() for path in files if path.name not in ("manifest.json", "steps.log")}
    if "report.md" in shown:  # it parts mentions from their names by a character without width
        shown["report.md"] = re.sub("(?<=[@#!-])\u200b", "", shown["report.md"])
    assert {"report.html", "page.html"} & shown.keys()
    assert {} == {name: UNSEEN.findall(text)[:5] for name, text in shown.items() if UNSEEN.search(text)}
    assert [] == [name for name, text in shown.items() if name.endswith(".html") and "<script>alert" in text]
    assert [] == [cell for path in files if path.suffix == ".csv" for cell in formulas(path)]


def test_where_a_report_was_written_is_shown_without_what_a_terminal_obeys(
    tmp_path: Path, study: Path, capsys: pytest.CaptureFixture[str]
):
    """Its name comes from others, too: of a run, of a study, and of a page, where markup stays text."""
    outer = tmp_path / f"of {ESCAPES}\n[bold red]x"
    outer.mkdir()
    run = golden_files.copied("vllm_plain", outer)
    append(study, *judged())
    other = golden_files.copied("two_engines", outer)
    study = study.rename(outer / "study")
    for arguments in ((run,), (study,), (run, other, "--output", outer / "page.html")):
        assert 0 == ran("report", *arguments)
        said = capsys.readouterr()
        assert [] == UNSEEN.findall(said.out + said.err)
        assert "\\x0a[bold red]x" in said.out


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 200_000,
        '{"run_id": "r", "config": {}}',
        "\x00",
        "{}",
        f'{{"run_id": "{"r" * 2**22}"}}',
    ],
)
def test_a_run_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: str):
    """Of `report`, of several, of --base, and of `compare`."""
    good, bad = golden_files.copied("two_engines", tmp_path), tmp_path / "bad"
    (bad / "raw").mkdir(parents=True)
    (bad / "manifest.json").write_text(manifest)
    for arguments in (("report", bad), ("report", bad, good), ("report", good, "--base", bad), ("compare", bad, good)):
        out = () if arguments[0] == "report" else ("--out", tmp_path / "out")
        assert 2 == ran(*arguments, *out)
        assert 1 == capsys.readouterr().err.count("\n")


STEP = Step(kind="level", label="open-1", load="open", level=1.0, duration=1.0, seed=1)
RUN = "steps/0001-open-1"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of one step, with a recorded run in its place."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)
    parameters = Parameters(duration=1.0, levels=(0.5,), capacity=4.0)
    record = StudyRecord(
        study_id=f"20261122{ESCAPES}",
        tool={"name": "sidelight", "version": ESCAPES},
        command=["sidelight", FORMULA, ESCAPES],
        started_at="2026-11-22T12:00:00.000Z",
        asked=StudySettings(test="tiny", scale="short", parameters=parameters, seed=1, options={ESCAPES: ESCAPES}),
        options={},
        seen={},
        host={},
    )
    path = create(tmp_path / "study", record).path
    golden_files.copied("two_engines", path / "steps").rename(path / RUN)
    return path


def judged(run: str = RUN, *, number: int = 1, **changes: Any) -> list[Frame]:
    """Return the frames of a step that has ended."""
    outcome = Outcome(status="complete", sent=3, notes=(ESCAPES,), limit_reason=ESCAPES, **changes)
    return [
        Decided(at_ns=1, number=number, step=STEP),
        StepStarted(at_ns=2, number=number, run=run),
        StepEnded(at_ns=3, number=number, status="complete"),
        Judged(at_ns=4, number=number, outcome=outcome),
    ]


def test_a_study_of_an_attacker_is_reported_and_obeyed_in_nothing(
    study: Path, victim: Path, capsys: pytest.CaptureFixture[str]
):
    """Its texts move no cursor, in no file; links at the places of its files are replaced."""
    append(study, *judged())
    for name in ("result.json", "report.txt", "report.html"):
        (study / name).symlink_to(victim / "mine")
    (study / f"{ESCAPES}.txt").touch()
    assert 0 == ran("report", study)
    said = capsys.readouterr()
    assert ("", set()) == (said.err, OBEYED & set(said.out))
    assert [] == obeyed(study)
    assert unharmed(victim)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("/", "names a run outside of the study"),
        ("steps/..", "names a run outside of the study"),
        ("../victim", "names a run outside of the study"),
        ("steps/0001-open-1/../../../victim", "names a run outside of the study"),
        ("steps/link", "steps/link: is a link, and links are not followed"),
        ("steps/none", "there is no such directory"),
    ],
)
def test_a_study_leads_to_no_other_place(
    study: Path, victim: Path, capsys: pytest.CaptureFixture[str], run: str, said: str
):
    """Neither by what its log says, nor by a link."""
    (study / "steps" / "link").symlink_to(victim)
    append(study, *judged(), *judged(run, number=2))
    other = golden_files.copied("two_engines", study.parent)
    for arguments in (("report", study), ("compare", study, other, "--out", victim / "out")):
        assert 2 == ran(*arguments)
        error = capsys.readouterr().err
        assert (1, True) == (error.count("\n"), said in error), error
    assert unharmed(victim)


def test_files_of_a_study_are_written_into_it_alone(study: Path, victim: Path, capsys: pytest.CaptureFixture[str]):
    """A link at the place of tables/ leads to any directory of ours. The report is printed all the same."""
    append(study, *judged())
    (study / "tables").symlink_to(victim)
    assert 2 == ran("report", study)
    said = capsys.readouterr()
    assert "tables: is a link, and links are not followed" in said.err
    assert "levels were measured" in said.out
    assert unharmed(victim)


@pytest.mark.parametrize("kind", ["FIFO", "link", "deep", "not-a-number", "level", "damaged"])
def test_a_study_that_none_writes_is_one_line(study: Path, capsys: pytest.CaptureFixture[str], kind: str):
    """Whatever of it is not what it should be."""
    append(study, *judged())
    log = study / LOG
    if kind == "FIFO":
        log.unlink()
        os.mkfifo(log)
    elif kind == "link":
        log.unlink()
        log.symlink_to("/dev/zero")
    elif kind == "deep":
        (study / "study.json").write_text('{"asked": ' + "[" * 200_000)
    elif kind == "not-a-number":
        text = (study / "study.json").read_text()
        (study / "study.json").write_text(text.replace('"capacity": 4.0', '"capacity": 1e999'))
    elif kind == "level":
        text = (study / "study.json").read_text()
        (study / "study.json").write_text(text.replace('"system": {}', '"system": {"boundary": [[[]]]}'))
    else:
        damaged = bytearray(log.read_bytes())
        damaged[40] ^= 1
        log.write_bytes(damaged)
    code = ran("report", study)
    said = capsys.readouterr()
    assert ((3 if kind == "damaged" else 2), 1) == (code, said.err.count("\n")), said.err + said.out
    assert ("steps.log is damaged: it lost 1 record" in said.err) == (kind == "damaged")
