"""The command line: one line an error, the exit codes of the contract, and no secret where others can read it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import golden_files
import pytest
from processes import Ended
from waiting import BOUND_S

from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.sidecar.__main__ import LEAST_BYTES
from sidelight.sidecar.cli.app import app
from sidelight.sidecar.cli.help import RARE
from sidelight.sidecar.options.fields import flag_of
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions

UNUSED = "http://127.0.0.1:9"  # discard: below 1024, so nothing that a test started listens there
RUN = f"run --url {UNUSED}"


Sidelight = Callable[..., Ended]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run", "--url is missing"),
        (f"{RUN} --rate 0", "--rate 0: must be greater than 0"),
        (f"{RUN} --rate fast", "--rate fast: must be a number"),
        (f"{RUN} --concurrency 1.5", "--concurrency 1.5: must be a whole number"),
        (f"{RUN} --requests 10,20", "several are a sweep: sidelight sweep URL --vary requests=10,20"),
        (f"{RUN} --barrier", "--barrier: sidelight run has no such option; with --concurrency each request that ends"),
        (f"{RUN} --rat 1", "--rat: sidelight run has no such option; did you mean --rate?"),
        (f"{RUN} --xyz=secret", "--xyz: sidelight run has no such option; `sidelight run --help-all` lists them"),
        (f"{RUN} --duration 30x", "--duration 30x: must be seconds, or a number with ms, s, m, h or d, like 30s"),
        (f"{RUN} --rate 1 --rate 2", "--rate: given more than once; give it once"),
        (f"{RUN} --workload uniform", ", ".join(workloads.NAMES)),
        (
            f"{RUN} --arrival poison",
            "--arrival poison: choose from poisson, uniform, gamma, burst, replay; did you mean poisson?",
        ),
        ("run --config nowhere.yaml", "--config nowhere.yaml: No such file"),
        ("run --config=nowhere.yaml", "--config nowhere.yaml: No such file"),
        ("run --config", "--config: needs a value; `sidelight run --help-all` says which"),
        ("demo --rate 0", "--rate 0: must be greater than 0"),
        ("demo --disaggregated --engine sglang", "--disaggregated: not with --engine sglang; leave --engine out"),
        ("demo --engine tgi", "--engine tgi: choose from vllm, sglang, trtllm"),
        ("scrape", "--metrics is missing"),
        ("doctor", "--url is missing"),
        ("report nowhere", "nowhere: there is no such directory; give the directory of a run (its --out)"),
        ("report", "report: the run directory is missing; give the one that a run wrote, e.g. "),
        ("schema everything", "OF everything: choose from config, scrape-config, "),
        ("rum", "rum: there is no such command; commands: demo, run, "),
        (f"{RUN} --arrival replay", "--arrival replay and --trace FILE need each other"),
        (f"{RUN} --trace t.csv", "--arrival replay and --trace FILE need each other"),
        (
            f"{RUN} --ramp linear",
            "--ramp: sidelight run has no such option; write a ramp over the whole load as --rate",
        ),
        (f"{RUN} --rate 4..20 --concurrency 2 --arrival burst", "--rate 4..20: burst arrivals cannot ramp"),
        (f"{RUN} --rate 4..0", "--rate 4..0: must be greater than 0 and at most 1000000"),
        (f"{RUN} --rate 4..", "--rate 4..: must be a number, a ramp like 4..20, or with --trace a speed like 2x"),
        (f"{RUN} --arrival uniform --burstiness 2", "--burstiness 2: "),
        (f"{RUN} --replay-speed 2", "write --rate 2x for twice the speed of --trace"),
        (f"{RUN} --rate 2x", "--rate 2x: is the speed of a trace; add --arrival replay --trace FILE"),
        (f"{RUN} --sessions", "--sessions needs --dataset"),
        (f"{RUN} --think-time 2", "--think-time 2: needs --sessions"),
        (f"{RUN} --rate 0.01 --duration 1", "--rate 0.01 --duration 1: no request would be sent"),
        (f"{RUN} --workers 999", "--workers 999: must be at most 256"),
        (f"{RUN} --slo ttft_p99<500", "--slo: 'ttft_p99<500': no unit; write the bound in ms or s, like 500ms"),
        (f"{RUN} --no-request-id", "--no-request-id: sidelight run has no such option; each request has an X-Request"),
        (f"{RUN} --keep-bytes 1GB", "a run is stopped when its logs reach 10 GB; a watch has --keep-bytes"),
        (f"{RUN} --save-requests a", "--save-requests: sidelight run has no such option; each run keeps its requests"),
        (f"{RUN} --replay-requests nowhere", "--replay-requests nowhere: there is no such directory"),
        (f"{RUN} --header novalue", "--header (7 characters without a colon): must be 'Name: value'"),
        (f"{RUN} --key k.pem", "--key k.pem: needs --cert"),
        (
            f"{RUN} --tokenizer /nope",
            "--tokenizer /nope: No such file or directory; give auto, server, cl100k_base or the path of a",
        ),
        (f"{RUN} --warmup often", "--warmup often: must be a whole number or 'draft'"),
        (f"{RUN} --ca nowhere.pem", "--ca nowhere.pem: No such file or directory; give the path of a PEM file"),
        (f"{RUN} --ca nowhere.pem --insecure", "--insecure and --ca nowhere.pem exclude each other"),
        (f"{RUN} --dataset nowhere", "--dataset nowhere: synthetic-uniform reads no data set; add --workload"),
        (
            f"{RUN} --header X-Foo",
            "--header 'X-Foo': must be 'Name: value' in one line, in quotes, e.g. 'X-Team: blue'",
        ),
        (f"{RUN} --header Authorization: Bearer sk-hush", "--header 'Bearer': must be 'Name: value'"),
        (f"{RUN} word", "'word' belongs to no option of `sidelight run`; put a value behind its option"),
        (f"{RUN} sk-1234567890abcdef", "'sk-12345...' belongs to no option"),
        (f"{RUN} Authorization:secret", "'Authoriz...' belongs to no option"),
        (
            "doctor ftp://user:secret@host",
            "ftp://...: a target of `sidelight doctor` must be an http:// or https:// URL",
        ),
        ("watch --duration 30s", "--duration: sidelight watch has no such option; a watch goes on until Ctrl-C"),
        ("watch --forward-keep 1h", "--forward-keep: sidelight watch has no such option; exports wait in memory only"),
        ("watch --scrape-interval 1,2", "--scrape-interval 1,2: must be"),
        (f"watch {UNUSED} --rate 3", "--rate: sidelight watch has no such option; `sidelight run` has it"),
        (f"watch --url {UNUSED}", "a metrics page stands alone, or behind --metrics: sidelight watch URL/metrics"),
        (f"{RUN} --vary concurrency=1,2", "--vary: sidelight run has no such option; `sidelight sweep` has it"),
        (f"sweep {UNUSED} --concurrency 1,2", "several are a sweep: sidelight sweep URL --vary concurrency=1,2"),
        (f"test ttft {UNUSED} --concurrency 1,2", "several are a sweep: sidelight sweep URL --vary concurrency=1,2"),
        (f"compare {UNUSED} {UNUSED} --concurrency 1,2", "are a sweep: sidelight sweep URL --vary concurrency=1,2"),
        (f"compare {UNUSED} {UNUSED} --pairs 1,2", "--pairs 1,2: must be a whole number"),
        ("run --url localhost", "--url localhost: must be an http:// or https:// URL, e.g. http://127.0.0.1:8000"),
        (f"{RUN} --rate 1e9", "--rate 1000000000: must be at most 1000000"),
        (f"{RUN} --rate 1e30", "--rate 1e30: must be at most 1000000"),
        (f"{RUN} --slo ttft_p9<1s", "--slo: 'ttft_p9<1s': p9 lets 91 % of the requests be slower"),
        ("http://127.0.0.1:9", "a URL alone is not a command; load the server with `sidelight run URL`"),
        ("profile", "profile: there is no such command; a server is loaded with `sidelight run"),
        (f"scrape {UNUSED} {UNUSED}", "--url: given more than once"),
        (f"{RUN} --api-key @no/where", "--api-key: no/where: No such file or directory; behind @ give the path"),
        (
            f"{RUN} --header @no/where",
            "--header @no/where: No such file or directory; give a file with a header a line",
        ),
        (f"{RUN} --extra-body {{'api_key'", "--extra-body: JSON is malformed: "),
        (f"sweep {UNUSED}1 --vary api-key=hush1,hush2", "--vary api-key: holds a secret, which would stand in every"),
        (f'sweep {UNUSED}1 --vary extra-body={{"token":"a"}}', "--vary extra-body: holds a secret, which would stand"),
        (f"{RUN} --rate inf", "--rate inf: all requests at once; add --requests N"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(sidelight: Sidelight, arguments: str, said: str):
    """The line names the field and what would be valid; no server is asked, and nothing is written."""
    ended = sidelight(*arguments.split())
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert ended.err.startswith("sidelight: ")
    assert said in ended.err
    assert [] == list(Path().iterdir())


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
        assert examined.out.startswith(f"fail  cannot connect to {host}")
    assert [] == list(Path().iterdir())  # no run was begun


def test_a_system_that_does_not_answer_is_named_as_it_was_typed(sidelight: Sidelight):
    """A comparison has no --url."""
    ended = sidelight("compare", "before=http://127.0.0.1:9", "after=http://127.0.0.1:10", "--rate", "1")
    assert (3, 1) == (ended.code, ended.err.count("before=http://127.0.0.1:9"))
    assert "--url" not in ended.err


def test_a_configuration_file_is_read_and_the_command_line_wins(sidelight: Sidelight):
    """Each key is the option of its name, checked like it."""
    Path("c.yaml").write_text(f"url: {UNUSED}0\nscrape-interval: 0.5\nscrape_timeout: 0\n", encoding="utf-8")
    assert "--scrape-timeout 0: must be greater than 0" in sidelight("run", "--config", "c.yaml").err
    taken = sidelight("run", "--config", "c.yaml", "--scrape-timeout", "1", "--url", "http://127.0.0.1:1")
    assert (3, True) == (taken.code, "127.0.0.1:1:" in taken.err)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"redact_bodies": True}, "--redact-bodies left no request in it"),
        (
            {"extra_body": '{"user_token": "***"}'},
            "its --extra-body had a secret, which is not recorded; give it again",
        ),
        ([], "r/raw/plan-measure.log: No such file or directory"),
    ],
)
def test_a_run_whose_requests_cannot_be_sent_again_is_refused(sidelight: Sidelight, config: object, said: str):
    """Before anything is sent, with the reason."""
    Path("r").mkdir()
    Path("r/manifest.json").write_text(json.dumps({"run_id": "r", "config": config}))
    ended = sidelight(*f"{RUN} --replay-requests r".split())
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert f"--replay-requests r: {said}" in ended.err or f"--replay-requests {said}" in ended.err


def test_no_command_has_the_name_of_an_option():
    """A configuration file would lose the option without a word: the parser takes its key for the command."""
    options = {field.name for kind in (RunOptions, ScrapeOptions, WatchOptions) for field in fields(kind)}
    assert set() == {name for name in app if name.replace("-", "_") in options}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate: 0", "--rate 0: must be greater than 0"),
        ("rate: 4..20\nconcurrency: 1\nbarrier: true", "there is no 'barrier' any more; with --concurrency each"),
        ("rate: fast", "--config c.yaml: rate fast: must be a number"),
        ("rate: [1, 2]", "--config c.yaml: rate: must be one value, but is a list"),
        ("slo: {ttft: 1}", "--config c.yaml: slo: must be a value, but is a mapping"),
        ("isl: 512", "unknown key 'isl'; did you mean 'input_tokens'?"),
        ("duration: 5 minutes", "--config c.yaml: duration '5 minutes': must be seconds, or a number with ms"),
        ("workload: {inptu: 512, output: 128}", "inptu: unknown field (did you mean 'input'?)"),
        ("input_tokens: {normal: {mean: 512}}", "normal.std: is missing; add it"),
        ("endpoint: chatt", "endpoint chatt: choose from chat, completions, "),
        ("scrape-intervall: 1", "unknown key 'scrape-intervall'; did you mean 'scrape_interval'?"),
        ("rate: [1", "c.yaml, line 3, column 1: not YAML"),
    ],
)
def test_a_configuration_file_is_checked_like_options(sidelight: Sidelight, text: str, said: str):
    """One line, exit 2, whatever is wrong with it."""
    Path("c.yaml").write_text(f"url: {UNUSED}\n{text}\n", encoding="utf-8")
    ended = sidelight("run", "--config", "c.yaml")
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert said in ended.err


def test_off_in_a_configuration_file_is_off(sidelight: Sidelight):
    """As the option's help has it, without quotes; YAML 1.1 would make a boolean of it."""
    Path("c.yaml").write_text(f"url: {UNUSED}\nlisten: off\n", encoding="utf-8")
    ended = sidelight("run", "--config", "c.yaml")
    assert (3, True) == (ended.code, "Connection refused" in ended.err)


def test_a_traceback_is_shown_when_asked_for(sidelight: Sidelight):
    """Above the line, which stays the last."""
    shown = sidelight("run", "--verbose", "--url", UNUSED, "--rate", "0").err
    assert shown.startswith("Traceback")
    assert shown.endswith("\nsidelight: --rate 0: must be greater than 0 [option.value]\n")


def test_a_configuration_file_may_ask_for_tracebacks(sidelight: Sidelight):
    """As --verbose does."""
    Path("c.yaml").write_text(f"url: {UNUSED}\nrate: 0\nverbose: true\n", encoding="utf-8")
    shown = sidelight("run", "--config", "c.yaml").err
    assert shown.startswith("Traceback")
    assert shown.endswith("\nsidelight: --rate 0: must be greater than 0 [option.value]\n")


@pytest.mark.parametrize("manifest", ["{}", "[]", '"text"', '{"name": "A web app"}', "{", ""])
def test_a_manifest_of_something_else_is_one_line_and_exit_2(sidelight: Sidelight, manifest: str):
    """A directory with another program's manifest.json is not a run directory."""
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


@pytest.mark.parametrize(
    ("of", "title"),
    [
        ([], "Sidelight configuration"),
        (["config"], "Sidelight configuration"),
        (["scrape-config"], "Sidelight configuration"),
        (["watch-config"], "Sidelight configuration"),
        (["summary"], "Sidelight summary"),
        (["server-metrics"], "Sidelight server metrics export"),
    ],
)
def test_schemas_are_printed(sidelight: Sidelight, of: list[str], title: str):
    """As JSON, ready for an editor."""
    printed = sidelight("schema", *of)
    assert (0, "", title) == (printed.code, printed.err, json.loads(printed.out)["title"])


def test_a_report_does_not_wait_for_a_client():
    """What was scraped is read back without an HTTP client, which takes a sixth of a second to load."""
    loaded = "import sys, sidelight.sidecar.report.derive; print(sorted({'aiohttp', 'grpc'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert "[]\n" == shown.stdout


def test_signals_are_heeded_before_what_takes_time_is_imported():
    """Until then SIGTERM is Python's: exit code 143, where 130 is documented."""
    code = "import sys; before = set(sys.modules); import sidelight.sidecar.__main__; print(*set(sys.modules) - before)"
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "sidelight.sidecar.__main__" in imported
    assert not {"typing", "asyncio", "email", "importlib.metadata"} & set(imported)


def test_the_help_of_a_run_fits_in_three_screens():
    """Each option that people type has two lines at most; --help-all has all options, and names each."""
    brief, full = (
        subprocess.run(
            [sys.executable, "-m", "sidelight", "run", option],
            check=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"},
        ).stdout
        for option in ("--help", "--help-all")
    )  # fmt: skip
    shown = [line for line in brief.splitlines() if line.startswith("│ ")]
    assert brief.count("\n") <= 3 * 40
    assert not any(a.startswith("│    ") and b.startswith("│    ") for a, b in pairwise(shown))
    assert "sidelight run --help-all" in brief
    hidden = {name for name in map(flag_of, RunOptions.__dataclass_fields__) if f"│ {name} " not in brief}
    assert hidden == {name for name in RARE if name != "--metrics-timeout"} | {"--scrape-timeout"}
    assert all(f"│ {name} " in full for name in RARE)


def test_help_does_not_wait_for_numpy():
    """Nor for other imports that only a run or a report needs: they cost a multiple of what --help takes."""
    heavy = "{'numpy', 'aiohttp', 'pyarrow', 'grpc', 'yaml'}"
    loaded = f"import sys, sidelight.sidecar.cli.app; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert "[]\n" == shown.stdout


@pytest.mark.parametrize(("missing_bytes", "code"), [(1, 3), (0, 0)])
def test_too_little_memory_is_said_before_a_library_asks_for_it(tmp_path: Path, missing_bytes: int, code: int):
    """Some end the process where they get none, and OpenBLAS asks again and again: with less than the least that is
    asked for, one line; with that, a report.
    """
    most_bytes = LEAST_BYTES - missing_bytes
    run = golden_files.copied("two_engines", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "sidelight", "report", run],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes)),
    )
    assert code == ended.returncode, ended.stderr
    assert bool(code) == (ended.stdout == "") == ended.stderr.endswith("(ulimit -v), and needs 512: raise the limit\n")
    assert ended.stderr.count("\n") <= 1


COMPLETED = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
_sidelight; echo "${COMPREPLY[*]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here to complete")
def test_a_shell_completes_commands_options_and_choices(
    sidelight: Sidelight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of the draft's commands too, which are imported by name; the installed script alone is asked."""
    path = tmp_path / "completion"
    monkeypatch.setenv("HOME", str(tmp_path))  # its .bashrc gets a line
    assert 0 == sidelight("--install-completion", "--shell", "bash", "--output", str(path)).code
    for typed, completed in (
        ("sw", "sweep"),
        ("run --conc", "--concurrency"),
        ("sweep --var", "--variant --vary"),
        ("run --endpoint chat", "chat"),
    ):
        command = ["bash", "-c", COMPLETED, "_", path, "sidelight", *typed.split()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
        assert completed == shown.stdout.strip(), shown.stderr
