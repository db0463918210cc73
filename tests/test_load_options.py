"""What each option of a load does, as a user sees it: a process, servers on loopback, and what a run leaves behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from processes import QUIET, Ended, Script, engine, serving, sidelight

from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.loadgen.records import PlannedRequest, read_plan
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.sidecar.run import open_run

MS = 1_000_000

TINY = "name: tiny\ncontent: words\ninput: 20\noutput: 3\n"
DESK = """\
name: desk
content: words
output: 4
classes:
  - {name: short, weight: 1, input: 12}
  - {name: talk, weight: 1, input: 16, turns: 2, think_time_s: 0.05}
"""
PROMPTS = """\
{"prompt": "What is the capital of France?", "max_tokens": 3, "id": 1}
{"text": "Tell me about the sea.", "output_tokens": 4, "headers": {"Authorization": "Bearer %s"}}
{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "max_tokens": 2}
{"prompt": "Hello.", "session": "a", "max_tokens": 5}
{"prompt": "And now?", "session": "a", "max_tokens": 6}
"""
SECRET = "geheim-7"
TALKS = "name: talks\ncontent: words\ninput: 16\noutput: 60\nturns: 2\n"
HUNDRED = "name: hundred\ncontent: words\ninput: 20\noutput: 100\n"
RANDOM = "name: random\ninput: {uniform: {min: 30, max: 60}}\noutput: 3\nsystem_prompt: {tokens: 8}\n"
TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,48,3
2023-11-16 18:17:04.0799600,31,2
2023-11-16 18:17:04.5799600,11,4
2023-11-16 18:17:04.7799600,25,1
"""
SOME = ("--rate", "60", "--requests", "12", "--warmup", "0")


@dataclass(frozen=True, kw_only=True)
class Loaded(Ended):
    """A load that ended."""

    @cached_property
    def log(self) -> RequestLog:
        """The measured requests, each of which ended well."""
        assert (0, "complete") == (self.code, self.summary["status"]), self.err
        log = open_run(self.path).requests
        measured = take(log, log.phase == "measure")
        assert {"ok"} == set(measured.status.tolist()), measured.error.tolist()
        return measured

    @property
    def plan(self) -> list[PlannedRequest]:
        """The measured requests as they were planned."""
        assert self.code in {0, 1}, self.err
        return list(read_plan(self.path / "raw" / "plan-measure.log"))

    @property
    def offsets_ns(self) -> list[int]:
        """When requests were due, from the start of the measurement."""
        return [int(at_ns) - self.summary["window"]["start_ns"] for at_ns in self.log.scheduled_ns]


def load(url: str, path: Path, *options: str) -> Loaded:
    """Run a quiet load to its end. Those that have to send the same as others do so with other hashes."""
    arguments = ("run", "--url", url, "--out", path, *QUIET, *options)
    run = sidelight(*arguments, path=path, fresh=path.name in {"two", "again"})
    return Loaded(code=run.code, out=run.out, err=run.err, path=path)


def tokenizer_json(path: Path) -> None:
    """Write a tokenizer of a model's own: a token a word, of as many words as it knows."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", *(f"w{number}" for number in range(200))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


# The runs against the engine, by name; {} is the directory with this file's inputs.
RUNS: dict[str, tuple[str, ...]] = {
    "one": (*SOME, "--workload", "{}/tiny.yaml", "--seed", "3", "--slo", "e2e_p99<60s,ttft_mean<30s"),
    "two": (*SOME, "--workload", "{}/tiny.yaml", "--seed", "3", "--workers", "2", "--slo", "ttft_p50<0.001ms"),
    "trace": ("--arrival", "replay", "--trace", "{}/azure.csv", "--rate", "2x", "--workload", "trace",
              "--warmup", "0"),
    "ramp": ("--rate", "4..60", "--duration", "1", "--arrival", "uniform",
             "--workload", "{}/tiny.yaml", "--warmup", "0"),
    "desk": (*SOME, "--workload", "{}/desk.yaml"),
    "draft": ("--concurrency", "16", "--requests", "4", "--workload", "{}/hundred.yaml", "--warmup", "draft"),
    "gamma": (*SOME, "--workload", "{}/tiny.yaml", "--tokenizer", "{}/tokenizer.json", "--arrival", "gamma",
              "--burstiness", "0.3"),
    "burst": (*SOME, "--workload", "{}/random.yaml", "--exact-tokens", "--arrival", "burst"),
    "prompts": ("--prompts", "{}/prompts.jsonl", "--concurrency", "2", "--requests", "6", "--warmup", "4"),
    "once": ("--prompts", "{}/prompts.jsonl", "--concurrency", "2", "--warmup", "0"),
    "talks": ("--concurrency", "4", "--workers", "2", "--requests", "8", "--workload", "{}/talks.yaml",
              "--warmup", "0"),
    "lengths": ("--request-rate", "inf", "--max-concurrency", "3", "--num-prompts", "6", "--num-warmups", "2",
                "--random-input-len", "24", "--osl", "normal:6,2,max=9"),
    "cap": ("--rate", "200", "--concurrency", "3", "--workers", "2", "--requests", "24", "--warmup", "0",
            "--input-tokens", "uniform:12-20", "--output-tokens", "12"),
    "slot": ("--concurrency", "1", "--workers", "2", "--requests", "4", "--workload", "{}/tiny.yaml", "--warmup", "3"),
}  # fmt: skip


def strict(out: Path) -> tuple[Loaded, Loaded]:
    """Run against a server that refuses `ignore_eos` and `stream_options`, and send what was sent there again."""
    with serving(Script()) as url:
        first = load(f"{url}/strict/one", out / "strict", *SOME)
        assert not any(b"ignore_eos" in request.body or b"stream_options" in request.body for request in first.plan)
        full = load(f"{url}/two", out / "full", *SOME)
        assert all(b"ignore_eos" in request.body and b"stream_options" in request.body for request in full.plan)
        again = ("--replay-requests", str(out / "full"), "--warmup", "0")
        return first, load(f"{url}/strict/two", out / "again", *again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All runs of the table; each is asked for by its name, and waited for."""

    files: Path
    urls: tuple[str, str]
    started: dict[str, Future[Loaded]]

    def __getitem__(self, name: str) -> Loaded:
        return self.started[name].result()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Two engines, and the runs of the table against the first, a few at a time, since each of them mostly waits."""
    files, out = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("runs")
    texts = {
        "tiny.yaml": TINY,
        "desk.yaml": DESK,
        "hundred.yaml": HUNDRED,
        "random.yaml": RANDOM,
        "talks.yaml": TALKS,
        "azure.csv": TRACE,
        "prompts.jsonl": PROMPTS % SECRET,
    }
    for name, text in texts.items():
        (files / name).write_text(text, encoding="utf-8")
    tokenizer_json(files / "tokenizer.json")
    with ExitStack() as stack:
        urls = (stack.enter_context(engine())[0], stack.enter_context(engine())[0])
        pool = stack.enter_context(ThreadPoolExecutor(4))
        started = {
            name: pool.submit(load, urls[0], out / name, *(option.replace("{}", str(files)) for option in options))
            for name, options in RUNS.items()
        }

        def replayed() -> Loaded:
            started["one"].result()
            return load(urls[0], out / "again", "--replay-requests", str(out / "one"), "--warmup", "0")

        def spread() -> Loaded:
            options = ("--rate", "60", "--requests", "11", "--workload", str(files / "tiny.yaml"), "--warmup", "0")
            return load(urls[0], out / "both", "--url", urls[1], *options)

        started |= {"again": pool.submit(replayed), "both": pool.submit(spread)}
        yield Runs(files=files, urls=urls, started=started)


def test_requests_take_the_urls_in_turn(runs: Runs):
    """Each of two engines gets every other request, in the order of the schedule; both have their pages scraped."""
    log = runs["both"].log
    expected = [f"{runs.urls[number % 2]}/v1/chat/completions" for number in range(11)]
    assert expected == log.endpoint_url.tolist()
    manifest = runs["both"].manifest
    assert list(runs.urls) == manifest["target"]["urls"]
    assert [f"{url}/metrics" for url in runs.urls] == [page["url"] for page in manifest["metrics_targets"]]


def test_two_workers_send_one_schedule(runs: Runs):
    """Merged, the log is the one worker's: the same requests, the same bytes, at the same moments."""
    single, two = runs["one"], runs["two"]
    assert 1 == two.code  # it misses its objective
    rows = open_run(two.path).requests
    assert list(range(12)) == rows.index.tolist() == single.log.index.tolist()
    assert single.offsets_ns == [int(at_ns) - two.summary["window"]["start_ns"] for at_ns in rows.scheduled_ns]
    assert single.summary["workload"]["requests_sha256"] == two.summary["workload"]["requests_sha256"]
    assert [request.body for request in single.plan] == [request.body for request in two.plan]
    logs = [path.stat().st_size for path in sorted((two.path / "raw").glob("requests-*.log"))]
    assert 2 == len([size for size in logs if size])


def test_two_workers_share_the_slots_of_sessions(runs: Runs):
    """Each keeps its half of them full, whatever the length of the sessions."""
    log = runs["talks"].log
    assert 16 == len(log)
    changes = sorted([(at_ns, 1) for at_ns in log.submit_ns] + [(at_ns, -1) for at_ns in log.end_ns])
    assert 4 == np.cumsum([change for _, change in changes]).max()


def test_fewer_slots_than_workers_send_everything(runs: Runs):
    """The warm-up and the measurement, and one at a time."""
    run = runs["slot"]
    assert (4, 3) == (len(run.log), run.summary["workload"]["warmup_requests"])
    assert all(run.log.submit_ns[1:] >= run.log.end_ns[:-1])


def test_lengths_are_given_in_place_of_the_workloads(runs: Runs):
    """By a command line of `vllm bench serve`: each prompt has 24 tokens, and the outputs are drawn from the seed."""
    run = runs["lengths"]
    assert [24] * 6 == [request.input_tokens for request in run.plan]
    assert all(1 <= request.max_tokens <= 9 for request in run.plan)
    assert len({request.max_tokens for request in run.plan}) > 1
    assert [request.max_tokens for request in run.plan] == run.log.output_tokens.tolist()
    assert ("24", "normal:6,2,max=9", 3, None) == tuple(
        run.manifest["config"][name] for name in ("input_tokens", "output_tokens", "concurrency", "rate")
    )
    (stated,) = run.manifest["workload"]["classes"]
    assert ({"type": "fixed", "value": 24}, "normal") == (stated["input_tokens"], stated["output_tokens"]["type"])
    assert "3 requests in flight, for 6 requests" in run.out
    assert "24 tokens in, normal:6,2,max=9 tokens out, seed 42" in " ".join(run.out.split())
    assert "held_back" not in run.summary["client"]


def test_a_cap_holds_back_what_is_due(runs: Runs):
    """Never more than three in flight over both workers; what waited is counted, said, and none of our lateness."""
    run = runs["cap"]
    log = run.log
    changes = sorted([(at_ns, 1) for at_ns in log.submit_ns] + [(at_ns, -1) for at_ns in log.end_ns])
    assert np.cumsum([change for _, change in changes]).max() <= 3
    held = run.summary["client"]["held_back"]
    assert (3, 0) == (held["cap"], held["not_sent"])
    assert (log.held_ns > 0).sum() == held["requests"] == held["held_ms"]["count"] > 0
    assert held["held_ms"]["max"] == pytest.approx(log.held_ns.max() / 1e6)
    late_ms = (log.dispatch_ns - log.scheduled_ns - log.held_ns) / 1e6
    assert run.summary["self_check"]["schedule_lateness_ms"]["max"] == pytest.approx(late_ms.max())
    assert (late_ms >= 0).all()
    said = " ".join(run.out.split())
    assert "200 requests/s (poisson), at most 3 in flight, for 24 requests" in said
    assert f"The cap of 3 requests in flight held back {held['requests']} requests (median " in said
    assert "this was not an open loop" in said


def test_objectives_that_are_met_are_exit_0(runs: Runs):
    """A line each in the report, and every request is good."""
    run = runs["one"]
    assert 0 == run.code
    assert "Objective e2e_p99<60s: met, " in run.out
    assert "Objective ttft_mean<30s: met, " in run.out
    slo = run.summary["client"]["slo"]
    assert (True, 12) == (slo["met"], slo["good_requests"])


def test_an_objective_that_is_missed_is_exit_1(runs: Runs):
    """The run is complete all the same, and its verdict is the miss."""
    run = runs["two"]
    assert (1, "complete", "") == (run.code, run.manifest["status"], run.err)
    assert "missed" == run.summary["verdict"]["state"]
    assert 0 == run.summary["client"]["throughput"]["goodput_requests_per_s"]


def test_gamma_arrivals_are_the_pure_functions(runs: Runs):
    """What was due, and in the log, is the schedule of the seed."""
    expected = schedule(
        Arrival(kind="gamma", rate_per_s=60.0, burstiness=0.3), seed=42, count=12, duration_s=None
    ).tolist()
    assert expected == runs["gamma"].offsets_ns
    assert "60 requests/s (gamma)" in runs["gamma"].out


def test_bursts_have_pauses(runs: Runs):
    """No request is due in the second behind each."""
    at_ms = np.array(runs["burst"].offsets_ns) / MS
    assert 12 == len(at_ms)
    assert all(at_ms % 2000 < 1000)


def test_a_trace_is_replayed_at_its_own_moments(runs: Runs):
    """At twice the speed, with its lengths."""
    run = runs["trace"]
    assert [0, 50 * MS, 300 * MS, 400 * MS] == run.offsets_ns
    assert [48, 31, 11, 25] == [request.input_tokens for request in run.plan]
    assert [3, 2, 4, 1] == run.log.output_tokens.tolist()
    assert f"arrivals of {runs.files / 'azure.csv'}" in " ".join(run.out.split())


def test_a_ramp_rises(runs: Runs):
    """From 4 to 60 requests/s in a second are 32, a quarter of the growth in the first half."""
    due_ns = [request.offset_ns for request in runs["ramp"].plan]
    assert 32 == pytest.approx(len(due_ns), abs=1)
    assert 9 == pytest.approx((np.array(due_ns) < 500 * MS).sum(), abs=1)
    # On a busy machine what would leave after the second stays here.
    assert due_ns[: len(runs["ramp"].offsets_ns)] == runs["ramp"].offsets_ns != []
    assert "4 to 60 requests/s (uniform)" in runs["ramp"].out


def test_saved_requests_are_sent_again(runs: Runs):
    """The same bytes at the same moments; their digest stands in both runs."""
    saved, again = runs["one"], runs["again"]
    digest = again.manifest["workload"]["replayed_sha256"]
    assert digest == saved.summary["workload"]["requests_sha256"] == again.summary["workload"]["requests_sha256"]
    assert [request.body for request in saved.plan] == [request.body for request in again.plan]
    assert saved.offsets_ns == again.offsets_ns
    assert saved.log.input_tokens.tolist() == again.log.input_tokens.tolist()


def test_classes_are_distinguished(runs: Runs):
    """A row each in the report, and the numbers of each in the summary."""
    run = runs["desk"]
    assert {"short", "talk"} == set(run.summary["client"]["classes"]) == set(run.log.workload_class.tolist())
    rows = [line.split()[0] for line in run.out.partition("Classes")[2].splitlines() if line.strip()]
    assert {"short", "talk"} <= set(rows)
    assert sum(group["requests"]["ok"] for group in run.summary["client"]["classes"].values()) == len(run.log)


def test_a_session_carries_its_history(runs: Runs):
    """A second turn has the first prompt, its reply and its own words; it comes the think time later."""
    log = runs["desk"].log
    talks = [np.flatnonzero(log.session == session) for session in sorted({*log.session.tolist()} - {-1})]
    assert len(talks) > 0
    assert len(log) == 12 + len(talks)
    for first, second in talks:
        assert (0, 1) == (log.turn[first], log.turn[second])
        assert log.input_tokens[second] > log.input_tokens[first] + 4
        assert log.scheduled_ns[second] == log.end_ns[first] + 50 * MS


def test_prompts_of_ones_own_are_sent_in_order(runs: Runs):
    """Each once; or from the top again where more are wanted, which the report says, as it says what it ignores."""
    once, again = runs["once"], runs["prompts"]
    assert [3, 4, 2, 5] == [request.max_tokens for request in once.plan]
    assert [3, 4, 2, 5, 3, 4] == [request.max_tokens for request in again.plan]
    log = once.log
    assert [3, 4, 2, 5, 6] == log.output_tokens[log.index.argsort()].tolist()
    (talk,) = np.flatnonzero(log.turn == 1)
    (begun,) = np.flatnonzero((log.session >= 0) & (log.turn == 0))
    assert log.submit_ns[talk] >= log.end_ns[begun]
    assert "--prompts: fields that Sidelight does not use are ignored: 'id' (line 1)" in once.summary["warnings"]
    assert [] == [text for text in once.summary["warnings"] if "were sent from a file" in text]
    assert (
        "6 requests were sent from a file of 4 prompts, so each was sent about 1.5 times: the engine's prefix cache "
        "may have answered repeats faster than it would new prompts; --requests 4 sends each once"
    ) in again.summary["warnings"]


def test_headers_of_prompts_are_not_recorded(runs: Runs):
    """They may be keys: no file of the run directory has them."""
    assert 4 == runs["prompts"].summary["workload"]["warmup_requests"]
    for run in (runs["once"], runs["prompts"]):
        assert run.code == 0
        files = [path for path in run.path.rglob("*") if path.is_file()]
        assert [] == [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_server_that_refuses_fields_is_asked_without(tmp_path: Path):
    """Saved requests too; the manifest and the report say which fields, and what that means."""
    for run in strict(tmp_path):
        assert {"ok"} == set(run.log.status.tolist())
        assert ["ignore_eos", "stream_options"] == run.manifest["target"]["refused_fields"]
        url = run.manifest["target"]["url"]
        reason = "Unrecognized request argument supplied"
        eos, usage = (text for text in run.summary["warnings"] if " refuses the field " in text)
        assert (
            f"{url} refuses the field ignore_eos ({reason}: ignore_eos), so requests are sent without it: "
            "replies may end before their planned length"
        ) == eos
        assert usage.endswith("where the server then reports no usage, output tokens are estimated from the text")


def test_a_warm_up_by_the_draft(runs: Runs):
    """100 requests and 10,000 tokens, drained and probed; the report says so."""
    run = runs["draft"]
    warmup = run.summary["methodology"]["warmup"]
    assert ("draft", True, True, 100, 10_000) == tuple(
        warmup[name] for name in ("policy", "drained", "meets_draft", "requests_ok", "output_tokens")
    )
    assert 3 == len(warmup["probes_before_ms"])
    assert len(warmup["probes_after_ms"]) >= 3
    assert len(warmup["probes_after_ms"]) % 3 == 0
    assert "Warm-up: 100 requests and 10,000 output tokens, drained; probes " in " ".join(run.out.split())
    assert 4 == len(run.log) == run.summary["client"]["requests"]["sent"]
    assert 100 == run.summary["workload"]["warmup_requests"]


def test_no_warm_up_is_a_cold_start(runs: Runs):
    """And the report says it."""
    run = runs["one"]
    assert ", no warm-up, " in " ".join(run.out.split())
    assert (True, None) == tuple(run.summary["methodology"]["warmup"][name] for name in ("cold_start", "drained"))


def test_a_tokenizer_of_ones_own(runs: Runs):
    """Its file is named with its digest, and prompts have the wanted number of its tokens."""
    run = runs["gamma"]
    tokenizer = run.manifest["tokenizer"]
    assert ("A, native", str(runs.files / "tokenizer.json")) == (tokenizer["option"], tokenizer["source"])
    digest = hashlib.sha256((runs.files / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer["version"].removeprefix("sha256 ") == digest[:16]
    assert 201 == tokenizer["vocab_size"]
    assert {20} == {request.input_tokens for request in run.plan}
    texts = [json.loads(request.body)["messages"][-1]["content"] for request in run.plan]
    assert {20} == {len(text.split()) for text in texts}
    assert 12 == len(run.log)


def test_exact_tokens_are_what_the_engine_counts(runs: Runs):
    """The number declared for each request is the prompt tokens of its usage, chat template and system prompt in it."""
    run = runs["burst"]
    declared = [request.input_tokens for request in run.plan]
    assert declared == run.log.input_tokens.tolist()
    assert 0 == run.summary["workload"]["missed_lengths"]
    assert len(set(declared)) > 3
    special = run.manifest["tokenizer"]["special_tokens"]
    assert "included" in special["chat_template"]


def test_headers_and_connections(tmp_path: Path):
    """A further header reaches the server in every request; without reuse each has a connection of its own."""
    script = Script()
    options = ("--concurrency", "1", "--requests", "5", "--warmup", "0", "--tokenizer", "cl100k_base")
    with serving(script) as url:
        run = load(f"{url}/good/team", tmp_path / "run", *options, "--header", "X-Team: blue", "--no-reuse")
    assert 0 == run.code
    # The first is the one for a token, before the load.
    assert ["blue"] * 6 == [headers["X-Team"] for _, headers in script.seen]
    assert ["close"] * 5 == [headers["Connection"] for _, headers in script.seen[1:]]
    assert 6 == len({connection for connection, _ in script.seen})
    assert "blue" not in (tmp_path / "run" / "manifest.json").read_text()
