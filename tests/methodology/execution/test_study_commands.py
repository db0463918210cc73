"""What `sidelight test` says to what it cannot do, before anything is sent; and what it would do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tiny_study import TINY

from sidelight.methodology import commands as study
from sidelight.methodology.execution.asking import with_values
from sidelight.methodology.execution.verb import asked_of
from sidelight.methodology.options import StudyOptions
from sidelight.methodology.procedures import PROCEDURES
from sidelight.sidecar.cli import draft
from sidelight.sidecar.cli.app import main
from sidelight.sidecar.options import schema
from sidelight.sidecar.options.config import as_recorded, command_as_recorded
from sidelight.sidecar.options.load import RunOptions

URL = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny test be one of the draft's."""
    monkeypatch.setitem(PROCEDURES, TINY.name, TINY)
    monkeypatch.setattr(study, "TESTS", (*study.TESTS, TINY.name))


def test_of(*arguments: str) -> int:
    """Run `sidelight test` in this process; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["test", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


test_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "test: which test is missing; tests: throughput, ttft"),
        (("thruput", URL), "thruput: there is no such test; tests: throughput"),
        (("thruput", URL), "did you mean throughput?"),
        (("tiny", "--url", URL, "word"), "'word' belongs to no option"),
        (("tiny",), "--url is missing"),
        (("tiny", URL, "--levels", "25,1200%"), "--levels 25,1200%: must be more than 0 and at most 1000%"),
        (("tiny", URL, "--levels", "25,50"), "--levels 25,50: must be more than 0 and at most 1000%; write 25%"),
        (("tiny", URL, "--levels", "half"), "--levels half: must be a share, as in 70% or 0.7"),
        (("tiny", URL, "--capacity", "-1"), "--capacity -1: must be greater than 0"),
        (("tiny", URL, "--load", "50%"), "--load: the test tiny has no such number; it has --levels, --duration"),
        (("tiny", URL, "--rate", "3"), "--rate: sidelight test has no such option"),
        (("tiny", URL, "--scale", "long"), "--scale long: choose from letter, short"),
        (("tiny", URL, "--budget", "1s"), "--budget 1 s: tiny takes up to 1 min with steps of 1 s (--duration)"),
        (("tiny", URL, "--budget", "1s"), "; give --budget 1m, or --capacity if it is known [study.budget]\n"),
        (("tiny", URL, "--budget", "1s", "--capacity", "9"), "; give --budget 1m [study.budget]\n"),
        (
            ("capacity", URL, "--budget", "1m", "--capacity", "6", "--plan"),
            "up to 7 min with steps of 30 s (--duration); give --budget 7m [study.budget]\n",
        ),
        (("capacity", URL, "--budget", "1m"), "; give --budget 8m [study.budget]\n"),
        (("tiny", "--variant", "off"), "--variant off: must be NAME=URL, as in cache-off=http://127.0.0.1:8001"),
        (("tiny", "--variant", "a/b=http://h"), "--variant a/b: a name is of letters, digits"),
        (("tiny", "--variant", "a=http://h", "--variant", "a=http://g"), "--variant a: given more than once"),
        (("tiny", "--variant", "a=ftp://h"), "--variant a ftp://h: must be an http:// or https:// URL"),
        (("tiny", "--variant", '{"a": {"uri": "http://h"}}'), "--variant a: Object contains unknown field `uri`"),
        (("tiny", "--variant", f"a={URL}"), "--variant a: the test tiny measures a single configuration"),
        (("tiny", URL, "--sut", "absent.yaml"), "--sut absent.yaml: No such file or directory"),
        (("tiny", URL, "--sut", '{"boundry": 1}'), "--sut boundry: unknown field (did you mean 'boundary'?)"),
        (("tiny", URL, "--isolated", "--sut", '{"isolated": false}'), "--isolated: --sut declares `isolated: false`"),
        (
            ("guardrail", "--variant", f"baseline={URL}", "--sut", '{"variants": {"base-line": {}}}'),
            "--sut variants.base-line: there is no such --variant (did you mean 'baseline'?)",
        ),
        (("tiny", URL, "--from", "absent"), "absent: no study.json here; give the directory of a study"),
        (("tiny", "--resume", "absent"), "absent: no study.json here; give the directory of a study"),
        (("tiny", URL, "--until", "p99"), "--until: the test tiny has no such number"),
        (("ttft", URL, "--plan", "--until", "p99"), "ttft: --until p99: must be a percentile of the TTFT and a width"),
        (("all", URL, "--plan", "--until", "p99"), "ttft: --until p99: must be a percentile of the TTFT and a width"),
        (("guardrail", URL, "--plan"), "guardrail: this test compares a system without guardrails with others"),
        (("tiny", "--plan", "--variant", f"a={URL}"), "--variant a: the test tiny measures a single configuration"),
        (("all", "--variant", f"cached={URL}"), "--variant cached: no test takes one of that name; prefix-cache has"),
        (("all", "--plan", "--variant", f"cached={URL}"), "--variant cached: no test takes one of that name"),
        (("memory-pressure", URL), "memory-pressure: this test drives the system beyond its memory"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
):
    """What is wrong, and what to write; nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert 2 == test_of(*arguments)
    out, err = capsys.readouterr()
    assert said in err
    assert ("", 1) == (out, err.count("\n"))
    assert [] == list(tmp_path.iterdir())


def test_a_target_that_is_not_there_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit code 3."""
    assert 3 == test_of("tiny", URL, "--out", str(tmp_path / "study"))
    assert "cannot connect to 127.0.0.1:9" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_plan_has_steps_time_and_tokens_and_sends_nothing(capsys: pytest.CaptureFixture[str]):
    """By the capacity that is stated, and what a budget costs."""
    assert 0 == test_of("tiny", "--plan", "--capacity", "10", "--no-sentinel", "--duration", "1m")
    lines = capsys.readouterr().out.splitlines()
    assert ["1", "level", "5.00", "requests/s", "(50%)", "60", "s"] == lines[0].split()[:7]
    assert ["2", "level", "8.00", "requests/s", "(80%)", "60", "s"] == lines[1].split()[:7]
    assert lines[2].startswith("2 steps, about ")
    assert 0 == test_of("tiny", "--plan", "--capacity", "10", "--duration", "1m", "--budget", "75s")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--budget: sentinel on became off: whether the system drifted is not known"
    assert lines[1].startswith("--budget: duration 60 s became 1 s: ")


def test_a_plan_says_what_ends_a_step(capsys: pytest.CaptureFixture[str]):
    """So many requests where these come to their end first, else the duration."""
    for requests, until in (("30", ["30", "requests"]), ("3000", ["60", "s"])):
        with pytest.raises(SystemExit):
            main(["sweep", "--plan", "--vary", "concurrency=2", "--requests", requests, "--repeat", "1"])
        line = capsys.readouterr().out.splitlines()[-3]
        assert until == line.split()[5:7]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A study is not begun where files are."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "study.json").write_text("{}")
    for arguments in (("--resume", str(tmp_path)), ("--capacity", "3", "--from", str(tmp_path))):
        assert 2 == test_of("tiny", URL, *arguments)
    assert "study.json" in capsys.readouterr().err


def test_the_schemas_of_a_study_are_valid():
    """Of its result, of its configuration file, of the declaration of a system."""
    for described in (draft.result_schema(), schema.declaration()):
        Draft202012Validator.check_schema(json.loads(json.dumps(described)))


def test_all_tests_say_what_became_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first that cannot reach its target ends them, with its exit code."""
    assert 3 == test_of("all", URL, "--out", str(tmp_path / "all"), "--quiet")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(maxsplit=1)[0] == "throughput"
    assert "cannot connect to 127.0.0.1:9" in line


def test_all_tests_go_on_with_the_options_they_were_begun_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also those that had not begun; other options, and a directory that has none, are refused by name."""
    path = str(tmp_path / "all")
    assert 3 == test_of("all", URL, "--seed", "7", "--isolated", "--out", path, "--quiet")
    begun = capsys.readouterr().out
    assert 3 == test_of("all", "--resume", path, "--quiet")
    assert begun == capsys.readouterr().out
    assert 2 == test_of("all", "--resume", path, "--seed", "8")
    assert "--seed was 7 when the study began" in capsys.readouterr().err
    assert 2 == test_of("all", "--resume", str(tmp_path))
    assert "no all.json here; give the directory of all tests" in capsys.readouterr().err


def test_each_of_all_tests_is_asked_what_it_has(capsys: pytest.CaptureFixture[str]):
    """Configurations off and on are of the prefix cache, others of guardrails, and none of a test of a single one."""
    variants = [f"--variant={name}={URL}" for name in ("baseline", "input", "off", "on")]
    assert 0 == test_of("all", URL, "--plan", "--scale", "short", "--capacity", "6", "--isolated", *variants)
    lines = capsys.readouterr().out.splitlines()
    assert [*study.TESTS[:-1], "all"] == [line.split()[0] for line in lines]
    assert all(" about " in line for line in lines), lines


def test_a_mapping_of_configurations_is_parted_among_all_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As configurations that are given one by one; a test of a single one takes the first where there is no --url."""
    mapping = json.dumps({name: {"url": URL, "header": ["A: b"]} for name in ("off", "on", "baseline", "full")})
    assert 0 == test_of("all", "--plan", "--scale", "short", "--capacity", "6", "--variant", mapping)
    plans = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "left out" in plans["memory-pressure"]
    assert plans["prefix-cache"].startswith("8 steps")
    assert plans["guardrail"].startswith("8 steps")
    assert 3 == test_of("all", "--variant", mapping, "--out", str(tmp_path / "all"), "--quiet")
    assert "cannot connect to 127.0.0.1:9" in capsys.readouterr().out


def test_the_names_of_a_tests_configurations_declare_what_they_are():
    """A cache that is off in the configuration named off contradicts nothing; the file of --sut goes before."""
    sut = '{"prefix_caching": true, "price_per_hour": 2, "variants": {"on": {"prefix_caching": false, "engine": "x"}}}'
    options = StudyOptions(variant=(f"off={URL}", f"on={URL}"), sut=sut)
    system = asked_of(options, PROCEDURES["prefix-cache"])[0].system
    assert system["variants"] == {"off": {"prefix_caching": False}, "on": {"prefix_caching": False, "engine": "x"}}
    guarded = asked_of(replace(options, variant=(f"baseline={URL}", f"input={URL}"), sut=None), PROCEDURES["guardrail"])
    assert guarded[0].system["variants"]["input"] == {"input_filtering": True, "output_filtering": False}
    assert "variants" not in asked_of(replace(options, sut=None), PROCEDURES["throughput"])[0].system


def test_a_configuration_is_recorded_without_secrets():
    """Headers by their names, fields of a body and words of a command by what they are called, users of URLs not."""
    declared = {
        "a": {
            "url": "http://ann:hush@h",
            "header": ["X-Key: hush"],
            "extra-body": {"top_k": 1, "auth": {"key": "hush"}},
            "before": "serve --api-key hush --port 1",
        },
        "b": "http://h/?token=hush",
    }
    recorded = as_recorded(StudyOptions(variant=(json.dumps(declared), "c=http://ann:hush@h")))["variant"]
    assert {
        "a": {
            "url": "http://***@h",
            "header": ["X-Key: ***"],
            "extra-body": {"top_k": 1, "auth": {"key": "***"}},
            "before": "serve --api-key *** --port 1",
        },
        "b": "http://h/?token=***",
    } == json.loads(recorded[0])
    assert "c=http://***@h" == recorded[1]
    command = ["compare", f"--variant={json.dumps(declared)}", "--variant", "c=http://ann:hush@h"]
    assert ["compare", f"--variant={recorded[0]}", "--variant", recorded[1]] == command_as_recorded(
        command, StudyOptions
    )


def test_a_step_sends_what_its_record_masks():
    """A step's body is made of the recorded one, as that of a cache's salt; the secret is put back."""
    common = RunOptions(extra_body='{"api_key": "hush", "a": {"token": "hush"}, "top_k": 1}')
    masked = json.loads(as_recorded(common)["extra_body"])
    assert {"api_key": "***", "a": {"token": "***"}, "top_k": 1} == masked
    options = with_values(common, {"extra_body": json.dumps(masked | {"cache_salt": "s", "top_k": 2})})
    assert json.loads(options.extra_body or "") == {
        "api_key": "hush", "a": {"token": "hush"}, "top_k": 2, "cache_salt": "s"
    }  # fmt: skip
