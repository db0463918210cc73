"""The command line: one line an error, the exit codes of the contract, and no secret where others can read it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadgen import workloads
from sidecar import cli

NOBODY = "http://127.0.0.1:9"  # discard: below 1024, so nothing that a test started listens there


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Sidelight = Callable[..., Ended]


@pytest.fixture
def sidelight(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sidelight:
    """Run a command in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIDELIGHT_API_KEY", raising=False)

    def run(*arguments: str) -> Ended:
        # A configuration file configures the application, which a process has once.
        monkeypatch.setattr(cli.app, "config", ())
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        shown = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code=code, out=shown.out, err=shown.err)

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "--url is missing"),
        (["run", "--url", NOBODY, "--rate", "0"], "--rate 0: must be greater than 0"),
        (["run", "--url", NOBODY, "--rate", "-2.5"], "--rate -2.5: must be greater than 0"),
        (["run", "--url", NOBODY, "--rate", "fast"], 'Invalid value for --rate: unable to convert "fast"'),
        (["run", "--url", NOBODY, "--rate", "1", "--concurrency", "1"], "--rate and --concurrency exclude each other"),
        (["run", "--url", NOBODY, "--rat", "1"], "Did you mean --rate?"),
        (["run", "--url", NOBODY, "--workload", "uniform"], ", ".join(workloads.NAMES)),
        (["run", "--url", NOBODY, "--arrival", "poison"], 'Did you mean "poisson"?'),
        (["run", "--url", NOBODY, "--listen", "9464"], "--listen 9464: must be HOST:PORT"),
        (["run", "--url", "localhost:8000"], "must be an http:// or https:// URL"),
        (["run", "--config", "nowhere.yaml"], "--config nowhere.yaml: No such file"),
        (["run", "--config=nowhere.yaml"], "--config nowhere.yaml: No such file"),
        (["run", "--config"], "--config requires an argument"),
        (["demo", "--rate", "0"], "--rate 0: must be greater than 0"),
        (["demo", "--engine", "tgi"], 'Invalid value "tgi"'),
        (["scrape"], "--metrics is missing"),
        (["doctor"], "--url is missing"),
        (["report", "nowhere"], "nowhere: no manifest.json here"),
        (["report"], "requires an argument"),
        (["schema", "everything"], 'Invalid value "everything"'),
        (["rum"], 'Unknown command "rum"'),
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line_and_exit_2(sidelight: Sidelight, arguments: list[str], said: str):
    """The line names the field and what would be valid."""
    ended = sidelight(*arguments)
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert ended.err.startswith("sidelight: ")
    assert said in ended.err


def test_nothing_listens_is_one_line_and_exit_3(sidelight: Sidelight):
    """For every command that needs somebody to answer."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        host = f"127.0.0.1:{reserved.getsockname()[1]}"
        for command in ("run", "scrape"):
            ended = sidelight(command, "--url", f"http://{host}")
            assert (3, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
            assert host in ended.err
            assert "Connection refused" in ended.err
        examined = sidelight("doctor", "--url", f"http://{host}")
        assert (3, "") == (examined.code, examined.err)
        assert examined.out.startswith(f"lack  cannot connect to {host}")
    assert [] == list(Path().iterdir())  # no run was begun


def test_a_configuration_file_is_read_and_the_command_line_wins(sidelight: Sidelight):
    """Each key is the option of its name, checked like it."""
    Path("c.yaml").write_text(f"url: {NOBODY}0\nscrape-interval: 0.5\nscrape_timeout: 0\n", encoding="utf-8")
    assert "--scrape-timeout 0: must be greater than 0" in sidelight("run", "--config", "c.yaml").err
    taken = sidelight("run", "--config", "c.yaml", "--scrape-timeout", "1", "--url", "http://127.0.0.1:1")
    assert (3, True) == (taken.code, "127.0.0.1:1:" in taken.err)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate: 0", "--rate 0: must be greater than 0"),
        ("rate: 1\nconcurrency: 1", "--rate and --concurrency exclude each other"),
        ("rate: fast", "[rate]"),
        ("endpoint: chatt", 'Choose from: "chat", "completions"'),
        ("scrape-intervall: 1", "unknown key 'scrape-intervall'; did you mean 'scrape_interval'?"),
        ("rate: [1", "c.yaml, line 3, column 1: not YAML"),
    ],
)
def test_a_configuration_file_is_checked_like_options(sidelight: Sidelight, text: str, said: str):
    """One line, exit 2, whatever is wrong with it."""
    Path("c.yaml").write_text(f"url: {NOBODY}\n{text}\n", encoding="utf-8")
    ended = sidelight("run", "--config", "c.yaml")
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert said in ended.err


def test_off_in_a_configuration_file_is_off(sidelight: Sidelight):
    """As the option's help has it, without quotes; YAML 1.1 would make a boolean of it."""
    Path("c.yaml").write_text(f"url: {NOBODY}\nlisten: off\n", encoding="utf-8")
    ended = sidelight("run", "--config", "c.yaml")
    assert (3, True) == (ended.code, "Connection refused" in ended.err)


def test_a_traceback_is_shown_when_asked_for(sidelight: Sidelight):
    """Above the line, which stays the last."""
    shown = sidelight("run", "--verbose", "--url", NOBODY, "--rate", "0").err
    assert shown.startswith("Traceback")
    assert shown.endswith("\nsidelight: --rate 0: must be greater than 0\n")


@pytest.mark.parametrize(
    "spelling",
    [["--api-key", "hush"], ["--api-key=hush"], ["--api_key", "hush"], ["--api_key=hush"]],
    ids=" ".join,
)
def test_a_secret_is_masked_in_the_recorded_command(
    sidelight: Sidelight, monkeypatch: pytest.MonkeyPatch, spelling: list[str]
):
    """In every spelling that the command line takes."""
    arguments = ["run", "--url", NOBODY, *spelling, "--seed", "1"]
    assert 3 == sidelight(*arguments).code  # taken, and then nobody answers
    monkeypatch.setattr(sys, "argv", ["sidelight", *arguments])
    recorded = cli._command()
    assert "hush" not in " ".join(recorded)
    assert ["run", "--url", NOBODY, "--seed", "1"] == [part for part in recorded if part[:5] not in {"--api", "***"}]


@pytest.mark.parametrize("manifest", ["{}", "[]", '"text"', '{"name": "A web app"}', "{", ""])
def test_a_manifest_of_something_else_is_one_line_and_exit_2(sidelight: Sidelight, manifest: str):
    """A directory with another program's manifest.json is no run directory."""
    Path("app").mkdir()
    Path("app/manifest.json").write_text(manifest, encoding="utf-8")
    ended = sidelight("report", "app")
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert "app" in ended.err
    assert ["manifest.json"] == [path.name for path in Path("app").iterdir()]


def test_without_a_command_the_help_is_shown(sidelight: Sidelight):
    """Which names every command and the exit codes."""
    shown = sidelight()
    assert (0, "") == (shown.code, shown.err)
    for word in ("demo", "run", "scrape", "simulate", "report", "doctor", "schema", "Exit codes"):
        assert word in shown.out


@pytest.mark.parametrize("of", [[], ["config"], ["summary"]], ids=" ".join)
def test_schemas_are_printed(sidelight: Sidelight, of: list[str]):
    """As JSON, ready for an editor."""
    printed = sidelight("schema", *of)
    assert (0, "") == (printed.code, printed.err)
    title = "Sidelight summary" if of == ["summary"] else "Sidelight configuration"
    assert title == json.loads(printed.out)["title"]
