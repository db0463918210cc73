"""Whole runs at a router before a prefill engine and a decode engine, as users start them, against their truth."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Ended, engine, sidelight

from sidelight.sidecar.cli.measuring import free_pair

LOAD = ("--rate", "10", "--requests", "25", "--warmup", "2", "--output-tokens", "40", "--listen", "off", "--quiet")
PARTS = {"queue_ms", "prefill_ms", "router_ms", "decode_queue_ms", "first_step_ms"}


def run_at_pair(path: Path, *, decode: tuple[str, ...], hold: str) -> Ended:
    address = free_pair()
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                engine("--role", role, *more, "--otlp-endpoint", f"http://{address}", "--truth", path / role)
            )[0]
            for role, more in (("prefill", ()), ("decode", decode))
        ]
        router = ("--router", *urls, "--hold", hold, "--truth", path / "router")
        url, _ = stack.enter_context(engine(*router))
        pages = [option for each in urls for option in ("--metrics", f"{each}/metrics")]
        return sidelight("run", url, *pages, *LOAD, "--otlp-listen", address, "--out", path / "run", path=path / "run")


def truth(path: Path) -> dict[str, dict[str, Any]]:
    """The true times of a file, by the request's id."""
    return {record["request_id"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize(
    ("decode", "hold", "cause", "is_load"),
    [
        (("--kv-transfer", "400ms"), "0ms", "decode_queue", True),
        (("--kv-transfer", "5ms", "--max-num-seqs", "1", "--slow", "4"), "0ms", "decode_queue", False),
        (("--kv-transfer", "5ms"), "400ms", "router", None),
    ],
    ids=["slow transfer", "decode queue", "slow router"],
)
def test_the_largest_part_is_what_is_slow(
    decode: tuple[str, ...], hold: str, cause: str, is_load: bool | None, tmp_path: Path
):
    """By the spans each request's parts are the truth; within the decode engine's queue its gauges tell the load."""
    ended = run_at_pair(tmp_path, decode=decode, hold=hold)
    assert 0 == ended.code, ended.err
    prefills, decodes, routed = (truth(tmp_path / name) for name in ("prefill", "decode", "router"))
    rows = [row for row in ended.requests() if row["phase"] == "measure"]
    assert {("exact", "ok")} == {(row["breakdown_quality"], row["status"]) for row in rows}
    for row in rows:
        first, second, between = (times[row["request_id"]] for times in (prefills, decodes, routed))
        assert {
            "queue_ms": first["scheduled_ns"] - first["queued_ns"],
            "prefill_ms": first["first_token_ns"] - first["scheduled_ns"],
            "router_ms": second["arrival_ns"] - first["finished_ns"],
            "decode_queue_ms": second["scheduled_ns"] - second["queued_ns"],
            "first_step_ms": second["first_token_ns"] - second["scheduled_ns"],
        } == pytest.approx({name: 1e6 * row[name] for name in row if name in PARTS}, abs=1000)
        assert between["decode_call_ns"] - between["prefill_reply_ns"] >= 1e6 * float(hold.removesuffix("ms"))
        assert second["loaded_ns"] <= second["scheduled_ns"]
    # While loads fill the decode engine's queue, hardly any request waits in the prefill engine.
    assert is_load is not True or ended.summary["correlation"]["evidence"]["while_waiting"].get("scrapes", 0) <= 3
    # On a busy machine the verdict's cause may be the generator; what the TTFT is made of is the same.
    largest = max(ended.summary["verdict"]["parts"], key=lambda part: float(part["mean_ms"]))
    assert cause == largest["part"]
    if is_load is not None:
        stages = ended.summary["correlation"]["evidence"]["kv_loads"]
        assert is_load == (stages["load_ms"] > stages["before_ms"] + stages["after_ms"])


def test_the_demo_of_two_engines_without_arguments(tmp_path: Path):
    """All requests are shared, and each part of them is known."""
    quiet = ("--duration", "2", "--listen", "off", "--quiet")
    ended = sidelight("demo", "--disaggregated", *quiet, "--out", tmp_path / "demo", path=tmp_path / "demo")
    assert 0 == ended.code, ended.err
    known = {part["part"]: part["known_from"] for part in ended.summary["verdict"]["parts"]}
    assert {"engine spans"} == set(known.values())
    assert {"queue", "prefill", "router", "decode_queue", "first_step"} <= set(known)
