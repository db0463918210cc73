"""Studies by hand that comply with the draft without reserve: what tests of compliance spoil."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sidelight.loadgen.requests.delivery import Delivery, FirstTokens, RatioBounds
from sidelight.methodology.compliance.facts import StepFacts
from sidelight.methodology.compliance.requirements import requirements
from sidelight.methodology.study.findings import Plot, ResultQuantity, ResultTable, StudyFindings
from sidelight.methodology.study.model import Finished, Outcome, Parameters, SteadyWindow, Step, StudySettings
from sidelight.recorded.system import System, read_system
from sidelight.rundir.stats import describe

TESTS = (
    "ttft", "throughput", "tradeoff", "itl", "capacity", "fairness", "prefix-cache", "memory-pressure", "long-context",
    "guardrail", "compare",
)  # fmt: skip
WORKLOADS = {
    "fairness": "synthetic-skewed", "prefix-cache": "code-completion", "memory-pressure": "long-context",
    "long-context": "long-context", "guardrail": "conversation",
}  # fmt: skip
SYSTEM: dict[str, Any] = {
    "boundary": "model engine", "model": "tiny-llama", "model_version": "1", "quantization": "none",
    "accelerator": "none", "accelerator_count": 0, "accelerator_memory_gb": 0, "prefix_caching": True,
    "input_filtering": False, "output_filtering": False, "guardrails": [], "isolated": True, "recovery": "restart",
    "same_machine": True, "price_per_hour": 1.0, "largest_batch": 8,
    "variants": {"off": {"prefix_caching": False}, "full": {"input_filtering": True, "guardrails": ["Guard"]}},
}  # fmt: skip
ABOUT: dict[str, Any] = {
    "clock": {"resolution_ns": 1},
    "config": {"seed": 42, "endpoint": "grpc", "arrival": "poisson"},
    "target": {"model": "tiny-llama", "version": "1.0"},
    "tokenizer": {"name": "cl100k_base", "version": "1", "vocab_size": 100_277, "source": "tiktoken", "option": "B",
                  "special_tokens": {"bos_eos_input": "excluded"}},
    "clock_state": {"method": "none", "error_ms": None},
    "network_rtt_ms": [{"host": "127.0.0.1", "median": 0.1}],
    "warmup": {"meets_draft": True, "stable": True, "cold_start": False},
}  # fmt: skip
TRADEOFF = tuple(round(0.1 * k, 1) for k in range(1, 13))
# By test: its parameters, and its steps as (kind, share, variant).
STEPS: dict[str, tuple[Parameters, list[tuple[str, float | None, str]]]] = {
    "ttft": (Parameters(load=0.7, requests=10_000), [("level", 0.7, "")]),
    "throughput": (Parameters(min=1, max=10, increment=1), [("level", 0.9, ""), ("level", 1.0, "")]),
    "tradeoff": (Parameters(levels=TRADEOFF), [("level", share, "") for share in TRADEOFF]),
    "itl": (Parameters(), [("level", share, "") for share in (0.25, 0.5, 0.75, 0.9)]),
    "capacity": (Parameters(output_tokens=256, min=8, max=512, completion=0.99, slo="ttft_p99<500ms", per_slot=100),
                 [("level", None, "")]),
    "fairness": (Parameters(load=0.8, mix=0.8), [("alone", None, ""), ("mixed", None, "")]),
    "prefix-cache": (Parameters(), [("level", None, "off"), ("level", None, "on")]),
    "memory-pressure": (Parameters(), [("level", share, "") for share in (1.0, 1.1, 1.25, 1.5)]),
    "long-context": (Parameters(lengths=(1024, 2048), output_tokens=256, concurrency=1), [("level", None, "")] * 2),
    "guardrail": (Parameters(), [("level", share, name) for name in ("baseline", "input", "output", "full")
                                 for share in (0.25, 0.5, 0.75)]),
    "compare": (Parameters(pairs=3), [("pair", None, name) for name in ("a", "b")]),
}  # fmt: skip


def study(test: str) -> dict[str, Any]:
    """Return the arguments of `comply` for a study that is unconditionally compliant."""
    parameters, steps = STEPS[test]
    finished = [_finished(test, at, *step) for at, step in enumerate(steps, 1)]
    asked = StudySettings(test=test, scale="letter", parameters=parameters, seed=1,
                  variants=tuple(dict.fromkeys(variant for _, _, variant in steps if variant)))  # fmt: skip
    return {
        "test": test,
        "asked": asked,
        "system": system(),
        "finished": finished,
        "findings": findings(test),
        "facts": {each.run: facts(WORKLOADS.get(test, "synthetic-uniform")) for each in finished},
    }


def system(**changed: Any) -> System:
    """Return a declaration that leaves nothing out, but for what is changed; None leaves something out."""
    return read_system({name: value for name, value in {**SYSTEM, **changed}.items() if value is not None})


def _finished(test: str, number: int, kind: str, share: float | None, variant: str) -> Finished:
    closed = test in ("capacity", "long-context", "memory-pressure")
    load: Literal["open", "closed"] = "closed" if closed else "open"
    level = 1.0 if closed else float(number)
    step = Step(kind=kind, label=f"step-{number}", load=load, level=level, share=share, duration=300.0, seed=7,
                variant=variant)  # fmt: skip
    window = SteadyWindow(start_ns=0, end_ns=10**9, left_out=0.1, enough=True)
    return Finished(
        number=number,
        run=f"steps/{number:04d}",
        step=step,
        outcome=Outcome(status="complete", window=window),
    )


def findings(test: str) -> StudyFindings:
    """Return findings that hold all that the requirements of a test want reported."""
    wanted = [name.partition("|")[0] for each in requirements() if each.scope == test for name in each.reported]
    values = {name: ResultQuantity(value=1.0, unit="ms", n=10_000) for name in wanted if " " not in name}
    tables = [name.removeprefix("table ") for name in wanted if name.startswith("table ")]
    plots = [name.removeprefix("plot ") for name in wanted if name.startswith("plot ")]
    return StudyFindings(
        answer=(),
        results=values,
        tables=tuple(ResultTable(name=name, title=name, columns=(), rows=((1,),)) for name in tables),
        plots=tuple(Plot(name=name, title=name, kind="line", x_title="", y_title="", lines=()) for name in plots),
    )


def facts(workload: str = "synthetic-uniform", **changed: Any) -> StepFacts:
    """Return the facts of a step with which nothing is wrong, but for what is changed."""
    return StepFacts(**{**_facts(workload), **changed})


def _facts(workload: str) -> Mapping[str, Any]:
    classes = [{"input_tokens": {"min": 64, "max": 256}, "output_tokens": {"min": 32, "max": 128}},
               {"input_tokens": {"min": 1024, "max": 4096}, "output_tokens": {"min": 256, "max": 1024}}]  # fmt: skip
    nothing = describe(np.empty(0), "none")
    delivered = Delivery(
        itl_option="direct", statement="", content_rule="", first_tokens=FirstTokens(content=500, reasoning=0, tool=0),
        chunks=50_000, replies_in_chunks=500, replies_whole=0, replies_in_one_read=0,
        single_token_chunks_ratio=RatioBounds(least=1.0, most=1.0), same_read_ratio=0.0,
        tokens_per_chunk=describe(np.ones(500), ""), characters_per_chunk=nothing, server_itl_ms=nothing,
    )  # fmt: skip
    return {
        "about": {**ABOUT, "workload": {"label": workload, "source": "draft-x", "classes": classes}},
        "load_doubt": "", "workload": workload, "is_custom": False, "is_dataset": False, "requests_sha256": "ab",
        "unstated": (), "transport": "grpc", "arrivals": ("poisson", "uniform", "gamma", "burst", "replay"), "ok": 1000,
        "refused": 0, "stamp_ns": 1, "unrecorded": 0, "held": 0,
        "in_flight_mean": 1.0, "known_parts": ("queue", "prefill"), "gaps": 50_000, "long_requests": 500,
        "long_gaps": 25_000,
        "classes": {"short": 800, "long": 500},
        "delivery": delivered, "first_tokens": 500, "is_server_timed": False, "cached_ratio": None,
        "unshared_cached_ratio": 0.0, "hits": None, "is_clock_compared": False, "round_trip_ms": 0.1, "engine": "",
        "engine_version": "", "cache_config": {},
    }  # fmt: skip


def replaced(given: StepFacts, **changed: Any) -> StepFacts:
    """Return facts with others in their place."""
    return dataclasses.replace(given, **changed)
