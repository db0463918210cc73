"""The compliance statement: each requirement has a check, and each MUST and SHOULD a study that violates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import declared_studies as studies
import numpy as np
import pytest
import yaml
from declared_studies import TESTS, study
from msgspec.structs import replace
from recordings import log_of

from sidelight.correlator.breakdown import break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.table import unjoined
from sidelight.methodology.compliance.checks import CHECKS
from sidelight.methodology.compliance.facts import facts_of
from sidelight.methodology.compliance.requirements import requirements
from sidelight.methodology.compliance.runs import comply_run
from sidelight.methodology.compliance.statement import comply, satisfies
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings
from sidelight.methodology.study.model import Outcome
from sidelight.recorded.system import as_text
from sidelight.rundir.stats import describe

SPECIFICATION = Path(__file__).parents[3] / "shared/spec/methodology.yaml"
Study = dict[str, Any]
Spoil = Callable[[Study], None]


def about(path: str, value: object) -> Spoil:
    """Change what the manifest of each step says; None takes it away."""

    def spoil(given: Study) -> None:
        for run, facts in given["facts"].items():
            *outer, last = path.split(".")
            whole = branch = dict(facts.about)
            for name in outer:
                branch[name] = dict(branch[name])
                branch = branch[name]
            branch[last] = value
            given["facts"][run] = studies.replaced(facts, about=whole)

    return spoil


def fact(**changed: object) -> Spoil:
    """Change what the tables of each step say."""

    def spoil(given: Study) -> None:
        given["facts"] = {run: studies.replaced(facts, **changed) for run, facts in given["facts"].items()}

    return spoil


def delivery(**changed: object) -> Spoil:
    """Change how the replies of each step came."""

    def spoil(given: Study) -> None:
        for run, facts in given["facts"].items():
            given["facts"][run] = studies.replaced(facts, delivery=replace(facts.delivery, **changed))

    return spoil


def declared(**changed: object) -> Spoil:
    """Change what is declared; None takes it away."""
    return lambda given: given.update(system=studies.system(**changed))


def numbers(**changed: object) -> Spoil:
    """Change the numbers of the test."""

    def spoil(given: Study) -> None:
        given["asked"] = replace(given["asked"], parameters=replace(given["asked"].parameters, **changed))

    return spoil


def steps(**changed: object) -> Spoil:
    """Change what each step was to be."""

    def spoil(given: Study) -> None:
        given["finished"] = [replace(each, step=replace(each.step, **changed)) for each in given["finished"]]

    return spoil


def reported(**changed: object) -> Spoil:
    """Change what is reported."""
    return lambda given: given.update(findings=replace(given["findings"], **changed))


def plain(given: Study) -> None:
    """Take the report away, as of a plain run."""
    given["findings"] = None


def both(*spoils: Spoil) -> Spoil:
    """Spoil in several ways."""

    def spoil(given: Study) -> None:
        for each in spoils:
            each(given)

    return spoil


GATEWAY = both(declared(boundary="application gateway"), fact(workload="conversation", transport="http"))
FAR = {"same_machine": False, "boundary": "application gateway"}
MANY = ResultQuantity(value=1.0, unit="ms", n=1_000_000)
COUNTED = {"ttft_p50_ms": ResultQuantity(value=1.0, unit="ms", n=9_999)}
PAGE_ON, PAGE_OFF = ({"enable_prefix_caching": text} for text in ("True", "False"))
# Of each MUST and SHOULD: the test, what spoils a study that is compliant, and words of what is said then.
VIOLATIONS: dict[str, tuple[str, Spoil, str]] = {
    "sut-boundary": ("ttft", declared(boundary=None), "neither declared nor seen: boundary"),
    "clock-resolution": ("ttft", about("clock.resolution_ns", 15_600_000), "15,600,000 ns"),
    "clock-resolution-itl": ("ttft", about("clock.resolution_ns", 100_000), "100,000 ns"),
    "streaming": ("ttft", delivery(replies_in_chunks=0), "no reply came in chunks"),
    "open-loop": ("ttft", fact(arrivals=("uniform",)), "poisson"),
    "open-loop-shapes": ("ttft", fact(arrivals=("poisson", "uniform")), "burst"),
    "closed-loop": ("capacity", steps(level=2.0), "0.5"),
    "isolation": ("ttft", fact(held=3), "held 3 requests back"),
    "record-fields": ("ttft", fact(unrecorded=7), "7 requests"),
    "custom-workload": ("ttft", fact(is_custom=True, unstated=("content",)), "content"),
    "workload-input": ("ttft", fact(unstated=("input_tokens",)), "input_tokens"),
    "workload-output": ("ttft", fact(unstated=("output_tokens",)), "output_tokens"),
    "workload-content": ("ttft", fact(unstated=("domain", "language")), "domain, language"),
    "workload-prefix": ("ttft", fact(unstated=("shared_prefix",)), "shared_prefix"),
    "workload-engine": ("ttft", fact(workload="conversation"), "the workload is conversation"),
    "workload-gateway": ("ttft", both(GATEWAY, about("workload.label", "conversation (stand-in)")), "stand-in"),
    "seed": ("ttft", about("config.seed", None), "no seed is stated"),
    "publish-requests": ("ttft", fact(requests_sha256=None), "no hash"),
    "dataset-version": ("ttft", fact(is_dataset=True), "no hash"),
    "tokenizer": ("ttft", about("tokenizer.vocab_size", None), "vocabulary"),
    "token-counting": ("ttft", about("tokenizer.option", None), "not stated"),
    "token-counting-reference": ("compare", about("tokenizer.name", "tiny-llama"), "tokens of tiny-llama"),
    "special-tokens": ("ttft", about("tokenizer.special_tokens", None), "not stated"),
    "warmup": ("ttft", about("warmup.meets_draft", False), "shorter"),
    "warmup-probe": ("ttft", about("warmup.stable", None), "probes"),
    "cold-start": ("ttft", steps(warm_up="none"), "warmed up"),
    "protocol-gateway": ("ttft", both(GATEWAY, fact(transport="websocket")), "websocket"),
    "protocol-engine": ("ttft", fact(transport="http"), "http"),
    "chunking": ("ttft", delivery(single_token_chunks_ratio=studies.RatioBounds(least=None, most=None)), "not known"),
    "itl-option": ("ttft", delivery(itl_option="none"), "no reply came in chunks"),
    "itl-server-side": ("ttft", both(fact(is_server_timed=True), delivery(itl_option="A")), "too few"),
    "one-machine": ("ttft", declared(same_machine=False), "different machines"),
    "clock-ntp": ("ttft", both(declared(**FAR, clock_error_ms=3), about("clock_state.error_ms", 25.0)), "25 ms"),
    "clock-ptp": ("ttft", both(declared(**FAR, clock_method="NTP"), fact(is_clock_compared=True)), "by NTP"),
    "clock-method": ("ttft", declared(**FAR), "is not declared"),
    "network-rtt": ("ttft", fact(round_trip_ms=None), "round trip"),
    "latency-adjustment": ("ttft", reported(results={"ttft_adjusted_ms": COUNTED["ttft_p50_ms"]}), "adjusted"),
    "timestamps": ("ttft", fact(stamp_ns=1_000_000_000), "1,000,000,000 ns"),
    "guardrail-accounted": ("ttft", declared(input_filtering=None), "input_filtering"),
    "guardrail-disclosure": ("ttft", declared(guardrails=None), "guardrails"),
    "guardrail-default": ("ttft", GATEWAY, "not declared"),
    "guardrail-disabled": ("ttft", both(GATEWAY, declared(boundary="application gateway", output_filtering=None)),
                           "not declared"),
    "guardrail-comparative": ("ttft", GATEWAY, "no variant"),
    "ttft-params": ("ttft", declared(model_version=None, model=None), ": model_version"),
    "ttft-poisson": ("ttft", about("config.arrival", "uniform"), "arrivals are uniform"),
    "ttft-count": ("ttft", reported(results=COUNTED), "9,999 requests"),
    "ttft-first-token": ("ttft", fact(first_tokens=0), "no first token"),
    "ttft-percentiles": ("ttft", reported(results=COUNTED), "ttft_p99_9_ms"),
    "ttft-by-length": ("ttft", reported(tables=()), "table ttft-by"),
    "ttft-summary": ("ttft", declared(prefix_caching=None), "prefix_caching"),
    "ttft-table": ("ttft", reported(tables=()), "not reported: table"),
    "ttft-plot": ("ttft", reported(plots=()), "not reported: plot"),
    "throughput-params": ("throughput", steps(duration=20.0), "20 s"),
    "tradeoff-open-loop": ("tradeoff", steps(load="closed"), "closed"),
    "itl-min-output": ("itl", fact(long_requests=99), "99 requests"),
    "itl-workload": ("itl", fact(workload="synthetic-skewed"), "synthetic-skewed"),
    "itl-levels": ("itl", steps(share=0.5), "0.25"),
    "itl-excludes-ttft": ("itl", reported(results={"itl_p50_ms": MANY}), "1,000,000"),
    "capacity-workload": ("capacity", fact(workload="conversation"), "conversation"),
    "fairness-workload": ("fairness", fact(classes={"short": 900, "long": 120}), "120 requests of class long"),
    "fairness-load": ("fairness", numbers(load=0.5), "0.5"),
    "cache-two-configs": ("prefix-cache", declared(variants=None), "no two variants"),
    "cache-workload": ("prefix-cache", fact(workload="synthetic-uniform"), "synthetic-uniform"),
    "memory-workload": ("memory-pressure", fact(workload="synthetic-uniform"), "synthetic-uniform"),
    "memory-isolated": ("memory-pressure", declared(isolated=None), "isolated"),
    "long-context-workload": ("long-context", numbers(concurrency=16), "16 requests in flight"),
    "guardrail-workload": ("guardrail", fact(workload="synthetic-uniform"), "synthetic-uniform"),
    "compare-equivalence": ("compare", fact(requests_sha256=None), "differ"),
    "security-capacity": ("ttft", plain, "a plain run"),
    "security-gaming": ("ttft", fact(unshared_cached_ratio=0.4), "0.4"),
}  # fmt: skip


def test_the_checklist_is_the_specifications():
    """The same requirements in the same order, at the same levels."""
    if not SPECIFICATION.exists():
        pytest.skip("the recordings in ../shared are not here")
    wanted = yaml.safe_load(SPECIFICATION.read_text())
    assert [(each["id"], each["level"], each["section"], each["scope"].replace("_", "-")) for each in wanted] == [
        (each.id, each.level, each.section, each.scope) for each in requirements()
    ]


def test_every_requirement_has_one_check_and_every_check_a_requirement():
    """Rules, or a function; not both."""
    by_rules = {each.id for each in requirements() if each.all_rules()}
    assert not by_rules & set(CHECKS)
    assert by_rules | set(CHECKS) == {each.id for each in requirements()}


def test_every_must_and_should_is_violated_by_a_study():
    """None is left out below."""
    assert set(VIOLATIONS) == {each.id for each in requirements() if each.level != "part"}


@pytest.mark.parametrize("test", TESTS)
def test_a_study_without_fault_is_unconditionally_compliant(test: str):
    """Each of the draft's tests."""
    statement = comply(**study(test))
    assert [] == [each for each in statement.requirements if each.state == "not met"]
    assert "unconditional" == statement.verdict
    assert statement.sentence.startswith(f"The {test} test is unconditionally compliant with the draft: all ")
    assert satisfies(statement, "unconditional")


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_said(name: str):
    """With the reason, where it is seen and what to do; a MUST costs compliance, a SHOULD the word unconditional."""
    test, spoil, words = VIOLATIONS[name]
    given = study(test)
    spoil(given)
    statement = comply(**given)
    said = next(each for each in statement.requirements if each.id == name)
    assert "not met" == said.state
    assert words in said.reason
    assert said.evidence
    assert said.cure
    failing = statement.failing("must") or statement.failing("should")
    assert statement.verdict == ("not compliant" if statement.failing("must") else "conditional")
    assert ", ".join(each.id for each in failing) in statement.sentence
    if not statement.failing("must"):  # what has no keyword is no less missing, and is named too
        assert name in statement.sentence
    assert not satisfies(statement, "unconditional")
    assert satisfies(statement, "conditional") == (statement.verdict == "conditional")


def test_nothing_undeclared_is_taken_for_granted():
    """Of an empty declaration, each MUST that wants one is not met."""
    given = study("ttft")
    given["system"] = studies.read_system(None)
    missing = {each.id for each in comply(**given).failing("must")}
    assert {"sut-boundary", "ttft-params", "ttft-summary", "guardrail-accounted", "guardrail-disclosure"} <= missing


def test_a_step_is_as_warm_as_the_one_that_warmed_the_system_up():
    """Of several steps the first alone has a warm-up; where that fell short, it did so for all."""
    for is_enough in (True, False):
        given = study("itl")
        first, *later = given["facts"]
        about("warmup", {"meets_draft": is_enough, "stable": True, "cold_start": False})(given)
        for run in later:
            config = given["facts"][run].about["config"] | {"warmup": f"after:{first.rpartition('/')[2]}"}
            without = {"meets_draft": None, "stable": None, "cold_start": False}
            changed = given["facts"][run].about | {"config": config, "warmup": without}
            given["facts"][run] = studies.replaced(given["facts"][run], about=changed)
        assert ("unconditional" if is_enough else "not compliant") == comply(**given).verdict


def test_a_study_without_steps_is_not_judged():
    """Nor is one whose only step was void: unknown is not unmet. What that step saw is shown, as what it is."""
    given = study("ttft") | {"system": studies.read_system(None)}
    given["finished"] = [
        replace(each, outcome=Outcome(status="complete", void="foreign")) for each in given["finished"]
    ]
    for finished in ([], given["finished"]):
        statement = comply(**given | {"finished": finished, "whole": False})
        assert "not judged" == statement.verdict
        assert {"not judged"} == {each.state for each in statement.requirements}
        assert "no step counts" in statement.sentence
    assert "tiny-llama" == statement.system.model
    assert statement.system.seen["model"].endswith(", in a void step")


def test_what_a_study_lacks_that_is_not_complete_is_not_judged():
    """A test's own requirements and steps that are still to come are open; the others are judged by what there is."""
    given = study("tradeoff") | {"system": studies.read_system(None)}
    given["finished"] = given["finished"][:2]
    assert "not compliant" == comply(**given).verdict
    statement = comply(**given, whole=False)
    assert "not judged" == statement.verdict
    assert "not judged" == next(each.state for each in statement.requirements if each.id == "tradeoff-levels")
    assert "sut-boundary" in {each.id for each in statement.failing("must")}
    assert not satisfies(statement, "conditional")


def test_a_sentence_names_few_requirements():
    """Of many that are not met the first, and how many more."""
    given = study("ttft") | {"system": studies.read_system(None)}
    statement = comply(**given)
    names = [each.id for each in statement.failing("must")]
    assert len(names) > 5
    assert f"{names[4]} and {len(names) - 5} more)" in statement.sentence
    assert names[5] not in statement.sentence


@pytest.mark.parametrize(
    ("declaration", "changed", "name", "words"),
    [
        ({"prefix_caching": False}, {"hits": 4096.0}, "prefix_caching", "off, but is on in steps/0001 by prefix cache"),
        ({"prefix_caching": False}, {"cache_config": PAGE_ON}, "prefix_caching", "on its page"),
        ({"prefix_caching": True}, {"cache_config": PAGE_OFF}, "prefix_caching", "declared on"),
        ({"prefix_caching": False}, {"cached_ratio": 0.25}, "prefix_caching", "25.0 % of the prompt tokens"),
        ({"model": "big-llama"}, {}, "model", "declared as big-llama, but in steps/0001 tiny-llama is served"),
        ({"engine": "SGLang"}, {"engine": "vllm"}, "engine", "the page is that of vllm"),
        ({"engine_version": "0.9"}, {"engine_version": "0.11.2"}, "engine_version", "0.11.2 serves"),
        ({}, {"refused": 2}, "output_filtering", "2 requests were refused"),
    ],
)  # fmt: skip
def test_what_the_server_contradicts_is_said(declaration: Study, changed: Study, name: str, words: str):
    """In the statement, and what rests on the declaration is not met."""
    given = study("ttft")
    given["system"] = studies.system(**declaration)
    fact(**changed)(given)
    statement = comply(**given)
    assert 1 == len(statement.contradictions)
    assert words in statement.contradictions[0]
    if name in ("prefix_caching", "model"):
        said = next(each for each in statement.requirements if each.id == "ttft-params")
        assert ("not met", statement.contradictions[0]) == (said.state, said.reason)


@pytest.mark.parametrize(
    ("model", "quantization", "contradicted"),
    [
        ("org/Llama-3-8B-Instruct-AWQ", "none", True),
        ("org/Llama-3-8B-Instruct-AWQ", "awq-int4", False),
        ("Llama-3-8B-FP8", "bf16", True),
        ("Llama-3-8B-Q4_K_M.gguf", "Q4_K_M (GGUF)", False),
        ("Llama-3-8B", "fp8", False),
        ("awkward-quartz-8b", "none", False),
    ],
)
def test_a_quantization_other_than_the_models_name_says_is_a_contradiction(
    model: str, quantization: str, *, contradicted: bool
):
    """From a name that says none nothing follows."""
    given = study("ttft")
    given["system"] = studies.system(model=model, quantization=quantization)
    about("target.model", model)(given)
    assert contradicted == any("quantization" in sentence for sentence in comply(**given).contradictions)


@pytest.mark.parametrize(
    ("declaration", "changed"),
    [
        ({"model": "org/Llama-3", "served_as": "tiny-llama"}, {}),
        ({"engine": "TensorRT-LLM"}, {"engine": "trtllm"}),
        ({"engine": "text-generation-inference"}, {"engine": "tgi"}),
        ({"engine": "llama.cpp"}, {"engine": "llamacpp"}),
        ({"engine_version": "v0.11.2"}, {"engine_version": "0.11.2+cu128"}),
    ],
)
def test_another_name_of_the_same_is_no_contradiction(declaration: Study, changed: Study):
    """Of a model, an engine and a version."""
    given = study("ttft")
    given["system"] = studies.system(**declaration)
    fact(**changed)(given)
    assert [] == comply(**given).contradictions


def test_a_step_that_others_spoilt_contradicts_that_the_system_is_isolated():
    """Also where it is void for just that."""
    given = study("throughput")
    spoilt = Outcome(status="complete", void="foreign traffic", foreign_ratio=0.3)
    given["finished"][0] = replace(given["finished"][0], outcome=spoilt)
    words = "the system is declared isolated, but 30 % of its requests were not ours in steps/0001"
    assert [words] == comply(**given).contradictions


def test_a_variant_is_judged_by_its_own_declaration():
    """Hits where a variant is declared with caching contradict nothing; those of the one without do."""
    given = study("prefix-cache")
    run = {each.step.variant: each.run for each in given["finished"]}
    given["facts"][run["on"]] = studies.replaced(given["facts"][run["on"]], hits=512.0)
    assert "unconditional" == comply(**given).verdict
    given["facts"][run["off"]] = studies.replaced(given["facts"][run["off"]], hits=512.0)
    statement = comply(**given)
    assert "cache-two-configs" in {each.id for each in statement.failing("must")}
    assert "declared off, but is on in steps/0001" in statement.contradictions[0]


def test_what_the_server_shows_fills_what_was_not_declared():
    """With its source; what it shows does not count as declared."""
    given = study("ttft")
    given["system"] = studies.system(model=None, prefix_caching=None, same_machine=None, accelerator_count=None)
    fact(hits=64.0)(given)
    about("gpus", ["H100", "H100"])(given)
    statement = comply(**given)
    assert "unconditional" == statement.verdict
    assert "met" == next(each for each in statement.requirements if each.id == "ttft-params").state
    assert "declared" == next(each for each in statement.requirements if each.id == "guardrail-accounted").state


def test_a_sweep_is_no_test_of_the_draft():
    """It is judged by what every test has to meet, and said so."""
    given = study("ttft") | {"test": "sweep"}
    sentence = comply(**given).sentence
    assert sentence.startswith("The draft has no test sweep; as a measurement, it is unconditionally compliant with")


def test_a_plain_run_says_what_it_lacks():
    """Without findings nothing is reported."""
    given = study("ttft")
    given["findings"] = None
    missing = {each.id for each in comply(**given).requirements if each.state == "not met"}
    assert {"ttft-percentiles", "ttft-table", "report-full"} <= missing


@pytest.mark.parametrize(("count", "unmet"), [(999, {"p99", "p99_9"}), (9_999, {"p99_9"}), (10_000, set())])
def test_a_plain_run_is_judged_as_the_test_ttft(count: int, unmet: set[str]):
    """By its own declaration, its requests and their TTFT; what only a test reports it lacks."""
    config = studies.ABOUT["config"] | {"sut": as_text(studies.system()), "rate": 4.0}
    facts = studies.facts(about=studies.facts().about | {"config": config})
    statement = comply_run(facts, describe(np.arange(1.0, count + 1), ""), closed_loop=False)
    states = statement.requirements
    assert ("met" if not unmet else "not met") == states["ttft-percentiles"] == states["ttft-count"]
    assert ("declared", "not met") == (states["sut-boundary"], states["report-full"])
    assert ("not compliant" if unmet else "conditional") == statement.verdict
    assert statement.sentence.startswith("As a ttft test, this run is ")
    other = studies.replaced(facts, cache_config=PAGE_OFF)
    contradicted = comply_run(other, describe(np.ones(1), ""), closed_loop=False).contradictions
    assert [
        "prefix caching is declared on, but is off in this run by enable_prefix_caching on its page"
    ] == contradicted
    lacks_boundary = comply_run(studies.facts(), describe(np.ones(1), ""), closed_loop=False)
    assert "sut-boundary" in lacks_boundary.sentence


def test_findings_of_another_kind_do_no_harm():
    """A study whose findings are empty is judged all the same."""
    given = study("throughput")
    given["findings"] = StudyFindings(answer=(), results={})
    assert "unconditional" == comply(**given).verdict  # what is missing is a part, not a MUST


@pytest.mark.parametrize(("stamp", "unrecorded"), [("first_token_ns", 0), ("first_output_ns", 1)])
def test_a_reply_that_was_all_blank_is_recorded_though_it_has_no_first_token(stamp: str, unrecorded: int) -> None:
    stamps = {"submit_ns": 1, "first_output_ns": 2, "first_token_ns": 2, "last_output_ns": 3, "last_token_ns": 3}
    log = log_of(2, **(stamps | {"input_tokens": 5, "output_tokens": 9, "status": "ok", stamp: [2, -1]}))
    parts = break_down(log, unjoined(len(log)), nothing(len(log), "not scraped"))
    assert facts_of(log, parts, (), {}).unrecorded == unrecorded
