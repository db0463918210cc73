"""Options of AIPerf, GuideLLM and `vllm bench serve`: each runs, or names what to write."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable

import pytest
from processes import Ended

from sidelight.sidecar.cli.arguments import translate
from sidelight.sidecar.cli.peers import HINTS, RENAMED
from sidelight.sidecar.options.fields import flag_of
from sidelight.sidecar.options.load import RunOptions

UNUSED = "http://127.0.0.1:9"
OURS = {flag_of(field.name) for field in dataclasses.fields(RunOptions)} | {"--no-reuse", "--help"}
Sidelight = Callable[..., Ended]


@pytest.mark.parametrize("name", HINTS)
def test_what_has_another_form_here_is_named_with_it(sidelight: Sidelight, name: str):
    """One line that begins with the option as it was typed and names one of ours, or says to leave it out; no server is
    asked.
    """
    ended = sidelight("run", UNUSED, *name.split(), *["value"][: 1 - name.count(" ")])
    assert (2, "", 1) == (ended.code, ended.out, ended.err.count("\n"))
    assert ended.err.startswith(f"sidelight: {name}: ")
    named = set(re.findall(r"--[a-z][a-z-]+", ended.err.removeprefix(f"sidelight: {name}: ")))
    assert named or "leave it out" in ended.err
    assert named <= OURS | {"--scale"}


@pytest.mark.parametrize("name", ["--endpoint-type", "--request-rate-mode", "--rate-type"])
def test_a_value_that_is_not_known_here_is_refused_with_those_that_are(sidelight: Sidelight, name: str):
    """As one of our own option is."""
    ended = sidelight("run", UNUSED, name, "other")
    assert 2 == ended.code
    assert f"sidelight: {RENAMED[name]} other: choose from " in ended.err


def test_what_a_hint_is_for_is_not_repeated(sidelight: Sidelight):
    """It may hold a key."""
    assert "hush" not in sidelight("run", UNUSED, "--backend", "kind=other,api_key=hush").err


def test_every_translation_is_to_an_option_and_hides_none():
    """No name of a table is an option of ours; each goes to one that is."""
    assert not {*RENAMED} & {*HINTS}
    assert not {*RENAMED, *HINTS} & OURS
    assert {*RENAMED.values()} <= OURS


# Commands of these three without what has another form here, each with what it says in our words; {U} is the server.
RUNNING = (
    (
        (
            "--base-url {U} --model m --random-input-len 512 --random-output-len 128 --num-prompts 8 "
            "--max-concurrency 2 --ignore-eos"
        ),
        "--url {U} --model m --input-tokens 512 --output-tokens 128 --requests 8 --concurrency 2 --ignore-eos",
    ),
    (
        (
            "--base-url {U} --request-rate inf --max-concurrency 16 --num-prompts 100 --seed 1 --header X-Team=blue "
            "X-User=ann --insecure"
        ),
        (
            "--url {U} --rate inf --concurrency 16 --requests 100 --seed 1 --header X-Team=blue --header X-User=ann "
            "--insecure"
        ),
    ),
    (
        "--base-url {U} --request-rate 4 --burstiness 1.0 --num-warmups 5 --result-dir results",
        "--url {U} --rate 4 --burstiness 1.0 --warmup 5 --out results",
    ),
    (
        ("-m m -u {U} --endpoint-type chat --concurrency 2 --request-count 8 --isl 512 --osl 128 --artifact-dir art"),
        (
            "--model m --url {U} --endpoint chat --concurrency 2 --requests 8 --input-tokens 512 --output-tokens 128 "
            "--out art"
        ),
    ),
    (
        (
            "--url {U} --request-rate 4 --request-rate-mode gamma --benchmark-duration 30 --random-seed 1 "
            "--synthetic-input-tokens-mean 512 --output-tokens-mean 128 --warmup-request-count 5 -H 'X-Team:blue' "
            "--api-key k"
        ),
        (
            "--url {U} --rate 4 --arrival gamma --duration 30 --seed 1 --input-tokens 512 --output-tokens 128 "
            "--warmup 5 --header X-Team:blue --api-key k"
        ),
    ),
    (
        "--url {U} --request-rate 8 --concurrency 4 --num-requests 50 --server-metrics {U}/metrics",
        "--url {U} --rate 8 --concurrency 4 --requests 50 --metrics {U}/metrics",
    ),
    (
        "--target {U} --rate-type poisson --rate 4 --max-seconds 30 --max-requests 100 --random-seed 1",
        "--url {U} --arrival poisson --rate 4 --duration 30 --requests 100 --seed 1",
    ),
)


@pytest.mark.parametrize(("typed", "ours"), RUNNING)
def test_a_command_of_theirs_runs(sidelight: Sidelight, typed: str, ours: str):
    """Lengths, rate, concurrency, count, header, key, TLS, seed, output: all are read, and the server is asked."""
    assert (
        shlex.split("run " + ours.replace("{U}", UNUSED))
        == translate(shlex.split("run " + typed.replace("{U}", UNUSED))).arguments
    )
    ended = sidelight("run", *shlex.split(typed.replace("{U}", UNUSED)), "--quiet")
    assert (3, "sidelight: cannot connect to 127.0.0.1:9: ") == (ended.code, ended.err[:42])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--backend openai --dataset-name hf --goodput ttft:500 tpot:50", ["--prompts FILE", "--slo"]),
        (
            '--target U --data {"prompt_tokens":512,"output_tokens":9,"output_tokens_stdev":8} --profile concurrent',
            ["--output-tokens N", "normal:MEAN,DEVIATION", "--concurrency N"],
        ),
        (
            (
                "--backend kind=openai_http,target=U,model=m --profile kind=concurrent,streams=2 --constraint "
                "kind=max_requests,count=8 --data kind=synthetic_text,prompt_tokens=512,output_tokens=128 --output "
                "kind=json,path=gl.json"
            ),
            ["--url URL", "--requests N", "--input-tokens N --output-tokens N", "--out DIR"],
        ),
        ("--url U --custom-dataset-type mooncake_trace --fixed-schedule", ["--trace FILE", "--arrival replay"]),
        ("--url U --temperature 0 --top_p 1", ["--extra-body '{\"temperature\": VALUE}'", '"top_p"']),
        ("--url U --isl 9 --num-prompts 8", ["--num-prompts: leave it out"]),
        ("--url U --isl 9 --isl-stddev 64", ["--input-tokens normal:MEAN,DEVIATION"]),
        ("--url U --rate-type constant --endpoint /generate", ["--arrival uniform", "--endpoint sglang"]),
        ("--profile sweep", ["sidelight test throughput URL --scale short"]),
        ("--profile throughput --max-seconds 9", ["--requests N", "sidelight test throughput URL"]),
        (
            "--cooldown 3 --nothing 1 --raet 2 --nowhere",
            ["--drain-timeout", "--nothing, --nowhere: sidelight run has no such option", "did you mean --rate?"],
        ),
    ],
)
def test_a_command_of_theirs_names_our_options(sidelight: Sidelight, typed: str, said: list[str]):
    """All that need another form in one line, so that one try is enough."""
    ended = sidelight("run", *shlex.split(typed, posix='"' not in typed))
    assert (2, 1) == (ended.code, ended.err.count("\n"))
    assert [] == [text for text in said if text not in ended.err]


def test_an_option_that_is_of_another_command_alone_is_named_with_it(sidelight: Sidelight):
    """Beside one that no command has; also where the command keeps it for its own steps."""
    said = sidelight("test", "ttft", "--burstiness", "0.5", "--nowhere").err
    assert "--burstiness: sidelight test has no such option; `sidelight run` has it; --nowhere: " in said


@pytest.mark.parametrize("command", ["doctor", "scrape", "test ttft", "compare", "sweep", "watch"])
def test_every_command_names_all_options_that_it_does_not_have(sidelight: Sidelight, command: str):
    """In one line; and none that it has, under whatever name."""
    ended = sidelight(*command.split(), "--nothing", "1", "--nowhere")
    assert (2, 1) == (ended.code, ended.err.count("\n"))
    assert f"--nothing, --nowhere: sidelight {command.split(maxsplit=1)[0]} has no such option" in ended.err
    assert "no such option" not in sidelight("sweep", "--vary", "concurrency=1", "--from", "d", "--plan").err


@pytest.mark.parametrize(
    ("typed", "sweep"),
    [
        ("--concurrency 1,2,4 --duration 9s", "--vary concurrency=1,2,4 --duration 9s"),
        ("--request-rate=1,2 --concurrency 8", "--vary rate=1,2 --concurrency 8"),
        ("--isl 64 --concurrency 1,32", "--input-tokens 64 --vary concurrency=1,32 --requests 64"),
        ("--profile concurrent --rate 1,2 --max-seconds 9", "--duration 9 --vary concurrency=1,2"),
    ],
)
def test_a_run_at_several_levels_is_a_sweep(typed: str, sweep: str):
    """Under other benchmarks' names too; as many requests as AIPerf sends at the widest."""
    assert ["sweep", *sweep.split(), "--url", UNUSED] == translate(["run", UNUSED, *typed.split()]).arguments


def test_a_run_at_several_levels_has_the_options_of_a_sweep(sidelight: Sidelight):
    """Its plan has a step a level and repeat; what a sweep lacks is refused in its name."""
    planned = sidelight("run", UNUSED, "--concurrency", "1,4", "--requests", "8", "--plan", "--repeat", "2")
    assert (0, 4) == (planned.code, len(re.findall(r" (?:1|4) in flight ", planned.out)))
    assert "--nowhere: sidelight sweep has no such option" in sidelight("run", UNUSED, "--rate", "1,4", "--nowhere").err


@pytest.mark.parametrize(
    ("typed", "load"),
    [
        ("--num-prompts 1000 --dataset-path f", "--requests 1000 --prompts f --rate inf"),
        ("--random-input-len 512", "--input-tokens 512 --rate inf --requests 1000"),
        ("--num-prompts 8 --result-dir f --input-file f", "--requests 8 --out f --prompts f --rate inf"),
        ("--num-prompts 8 --max-concurrency 2", "--requests 8 --concurrency 2"),
        ("--num-prompts 8 --rate 2", "--requests 8 --rate 2"),
        ("--num-prompts 8 --request-rate=2 --burstiness 0.5", "--requests 8 --rate 2 --burstiness 0.5 --arrival gamma"),
        ("--num-prompts 8 --arrival uniform", "--requests 8 --arrival uniform"),
        ("--num-prompts 8 --config f", "--requests 8 --config f"),
        ("--isl 512", "--input-tokens 512 --concurrency 1 --requests 10"),
        ("--isl 512 --concurrency 16", "--input-tokens 512 --concurrency 16 --requests 32"),
        ("--benchmark-duration 30", "--duration 30 --concurrency 1"),
        ("--input-file f.jsonl", "--prompts f.jsonl --concurrency 1"),
        ("--requests 8 --input-tokens 512", "--requests 8 --input-tokens 512"),
        ("--profile synchronous --max-requests 8", "--requests 8 --concurrency 1"),
        ("--rate-type concurrent --rate 4 --max-requests 8", "--requests 8 --concurrency 4"),
        ("--profile throughput --max-requests 8", "--requests 8 --rate inf"),
        ("--profile throughput --rate 4 --max-seconds 8", "--duration 8 --concurrency 4"),
    ],
)
def test_a_load_of_theirs_is_theirs(typed: str, load: str):
    """Without a rate, and with GuideLLM's number of streams; what is ours, or a load that was typed, stays."""
    assert ["run", *load.split()] == translate(["run", *typed.split()]).arguments


def test_a_load_that_was_not_typed_is_said(sidelight: Sidelight):
    """In a line of its own, and not where only the result is wanted."""
    ended = sidelight("run", UNUSED, "--num-prompts", "8")
    assert "sidelight: as vllm bench serve does without a rate: --rate inf" == ended.err.splitlines()[0]
    assert 1 == sidelight("run", UNUSED, "--num-prompts", "8", "--quiet").err.count("\n")
    assert "sidelight test throughput" in translate(["run", "--target", UNUSED, "--max-seconds", "9"]).implied
    assert not translate(["run", "--target", UNUSED, "--max-seconds", "9", "--rate", "2"]).implied


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (f"run {UNUSED} --quiet", f"run --quiet --url {UNUSED}"),
        (f"run --quiet {UNUSED} {UNUSED}", f"run --quiet --url {UNUSED} --url {UNUSED}"),
        (f"run --rate -1 {UNUSED}", f"run --rate -1 --url {UNUSED}"),
        (f"run --header A:1 B:2 {UNUSED}", f"run --header A:1 --header B:2 --url {UNUSED}"),
        (f"doctor {UNUSED} --verbose", f"doctor --verbose --url {UNUSED}"),
        (f"scrape --duration 5m {UNUSED}", f"scrape --duration 5m --url {UNUSED}"),
        (f"watch {UNUSED}", f"watch --metrics {UNUSED}"),
        (f"run --max_concurrency=2 --url={UNUSED}", f"run --concurrency 2 --url {UNUSED}"),
        (f"run --input_len 512 {UNUSED}", f"run --input-tokens 512 --url {UNUSED}"),
        (f"watch --listen-tls c.pem k.pem {UNUSED}", f"watch --listen-tls c.pem k.pem --metrics {UNUSED}"),
        (f"run {UNUSED} --listen_tls=c.pem k.pem --quiet", f"run --listen-tls c.pem k.pem --quiet --url {UNUSED}"),
        ("run localhost:8000", "run --url localhost:8000"),
        ("run --header A:1 B:2 [::1]:80/v1", "run --header A:1 --header B:2 --header [::1]:80/v1"),
        ("compare a=localhost:8000 b:80", "compare --variant a=localhost:8000 --variant B=b:80"),
        ("simulate --port 0", "simulate --port 0"),
        ("--help", "--help"),
    ],
)
def test_a_url_may_stand_alone(typed: str, ours: str):
    """It is the target of a load, and a page of a watch; other commands are left as they are."""
    assert ours.split() == translate(typed.split()).arguments


@pytest.mark.parametrize("typed", ["run 127.0.0.1:9", "run --url 127.0.0.1:9", "doctor -u 127.0.0.1:9/v1"])
def test_a_url_without_its_scheme_is_of_http(sidelight: Sidelight, typed: str):
    """Behind an option as alone: the server is asked."""
    ended = sidelight(*typed.split(), "--verbose")
    assert (3, True) == (ended.code, "cannot connect to 127.0.0.1:9: " in ended.err + ended.out)
