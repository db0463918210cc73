"""The published schemas: every configuration that works fits, and a summary that breaks the contract does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from sidelight.scraper.engines.recognition import QUANTITIES
from sidelight.sidecar.options import schema
from sidelight.sidecar.options.config import aliases, load_yaml
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions

STATISTICS = ("mean", "std", "min", "max", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99_9")

OPEN_LOOP = """
url: http://127.0.0.1:8000
model: llama
endpoint: completions
rate: 4
arrival: uniform
duration: 30.5
warmup: 100
seed: 1
"""
CLOSED_LOOP = """
url: https://engine.example/v1
concurrency: 16
requests: 500
tokenizer: cl100k_base
ignore_eos: false
metrics: [https://engine.example/metrics]
scrape_interval: 0.5
slice_duration: 1
api_key: null
"""
OUTPUT = """
url: http://127.0.0.1:8000
metrics:
  - http://127.0.0.1:8000/metrics
  - http://127.0.0.1:8001/metrics
out: runs/first
listen: "off"
quiet: true
json: true
verbose: false
"""


def errors(of: dict[str, Any], instance: object) -> list[str]:
    """Return what a schema objects to."""
    return [f"{list(error.absolute_path)}: {error.message}" for error in Draft202012Validator(of).iter_errors(instance)]


@pytest.mark.parametrize("make", [lambda: schema.configuration(RunOptions), schema.summary])
def test_a_schema_is_one(make: Any):
    """Of the dialect that it names."""
    Draft202012Validator.check_schema(make())
    assert "https://json-schema.org/draft/2020-12/schema" == make()["$schema"]


@pytest.mark.parametrize("text", [OPEN_LOOP, CLOSED_LOOP, OUTPUT, "{}"], ids=["open", "closed", "output", "nothing"])
def test_a_configuration_that_loads_fits(tmp_path: Path, text: str):
    """Written as users write it, keys as `load_yaml` gives them."""
    path = tmp_path / "sidelight.yaml"
    path.write_text(text, encoding="utf-8")
    assert [] == errors(schema.configuration(RunOptions), load_yaml(path, RunOptions))


def test_an_option_by_its_other_name_fits(tmp_path: Path):
    """`metrics_timeout` is `scrape_timeout`: a file that loads is one that an editor does not mark."""
    text = "url: http://127.0.0.1:8000\nmetrics_timeout: 2.5\n"
    path = tmp_path / "sidelight.yaml"
    path.write_text(text, encoding="utf-8")
    assert 2.5 == load_yaml(path, RunOptions)["scrape_timeout"]
    assert [] == errors(schema.configuration(RunOptions), yaml.safe_load(text))
    assert errors(schema.configuration(RunOptions), yaml.safe_load(text.replace("2.5", "soon")))


def test_keys_may_be_written_with_dashes():
    """Both ways load, and both ways fit; a mistake is seen in both."""
    options = {field.name: field.default for field in dataclasses.fields(RunOptions) if field.name != "config"}
    dashed = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    assert [] == errors(schema.configuration(RunOptions), dashed)
    assert errors(schema.configuration(RunOptions), {"scrape-interval": "often"})


@pytest.mark.parametrize(
    "text", ["rat: 1", "rate: fast", "endpoint: chatt", "metrics: [1]", "quiet: 1", "seed: 1.5", "warmup: often"]
)
def test_a_configuration_with_a_mistake_does_not(text: str):
    """An editor that knows the schema shows the mistake."""
    assert errors(schema.configuration(RunOptions), yaml.safe_load(text))


def test_every_option_is_described_with_its_default():
    """The schema has every option but the name of the file itself, also by its other name, and its defaults fit it."""
    described = schema.configuration(RunOptions)["properties"]
    names = {field.name for field in dataclasses.fields(RunOptions)} - {"config"} | set(aliases(RunOptions))
    assert names | {name.replace("_", "-") for name in names} == set(described)
    assert all(option["description"] for option in described.values())
    defaults = {name: option["default"] for name, option in described.items()}
    assert [] == errors(schema.configuration(RunOptions), defaults)


@pytest.mark.parametrize("options", [RunOptions, ScrapeOptions, WatchOptions])
def test_every_number_has_its_bounds(options: type):
    """What the command refuses, an editor marks: each number has a least and a greatest value."""
    described = schema.configuration(options)["properties"]
    numbers = {
        name: kind
        for name, option in described.items()
        for kind in option.get("anyOf", [option])
        if kind.get("type") in {"number", "integer"}
    }
    assert [] == [name for name, kind in numbers.items() if not {"minimum", "maximum"} <= set(kind)]
    interval = numbers["scrape_interval"]
    assert (0.01, 3600.0) == (interval["minimum"], interval["maximum"])


@pytest.mark.parametrize("text", ["rate: 0", "workers: 257", "warmup: -1", "seed: -1", "scrape_timeout: 4000"])
def test_a_value_out_of_bounds_does_not_fit(text: str):
    """The schema and the command refuse the same values."""
    assert errors(schema.configuration(RunOptions), yaml.safe_load(text))


@pytest.mark.parametrize(
    ("options", "text"),
    [(ScrapeOptions, "url: http://h\nduration: 5\nformats: json"), (WatchOptions, "keep: 1h\nlisten: 127.0.0.1:0")],
)
def test_scrape_and_watch_have_schemas_of_their_own(options: type, text: str):
    """Of their own options only."""
    assert [] == errors(schema.configuration(options), yaml.safe_load(text))
    assert errors(schema.configuration(options), {"rate": 1})


def properties(node: object, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Give every property that a schema names, at any depth."""
    if isinstance(node, dict):
        for name, member in node.get("properties", {}).items():
            if isinstance(member, dict) and where.rpartition("/")[2] not in {"if", "then", "else"}:
                yield f"{where}/{name}", member
        for key, inner in node.items():
            yield from properties(inner, f"{where}/{key}")
    elif isinstance(node, list):
        for position, inner in enumerate(node):
            yield from properties(inner, f"{where}/{position}")


def test_every_property_of_a_summary_is_described():
    """At every depth, so that a number can be looked up."""
    assert [] == [where for where, member in properties(schema.summary()) if not member.get("description")]


def types(node: dict[str, Any]) -> set[str]:
    """Return the JSON types that a property may have, those of its elements and alternatives among them."""
    named = node.get("type", [])
    inner = [*node.get("anyOf", ()), *node.get("prefixItems", ())]
    inner += [inner_node for key in ("items", "additionalProperties") if isinstance(inner_node := node.get(key), dict)]
    return {named} if isinstance(named, str) else set(named).union(*map(types, inner))


def test_every_number_of_a_summary_has_a_unit():
    """`1` where it is a pure number; statistics have the unit of their values."""
    numbers = {where: member for where, member in properties(schema.summary()) if types(member) & {"integer", "number"}}
    assert [] == [where for where, member in numbers.items() if not member.get("unit")]


def test_objects_of_a_summary_are_closed():
    """Only names that depend on data are free: kinds of errors, reasons, failures, sources, classes, what was asked."""
    free = {
        where.rpartition("/")[2]
        for where, member in properties(schema.summary())
        if member.get("type") == "object"
        and member.get("additionalProperties") is not False
        and "propertyNames" not in member
    }
    named = {"missing", "engines", "errors", "failures", "failed_readings", "config", "tests", "absent", "without"}
    named |= {"engine_only_ms", "models", "endpoints"}
    reasons = {"none_reasons", "estimated_reasons", "refused", "refused_reasons", "kinds", "examples"}
    assert named | reasons | {"classes", "special_tokens", "urls", "merged", "requirements"} == free


def test_a_summary_has_the_statistics_of_the_contract():
    """Every block of the client, and every canonical quantity of the server."""
    described = schema.summary()
    block = described["$defs"]["Statistics"]
    assert ["count", *STATISTICS] == block["required"]
    client = described["$defs"]["ClientSummary"]
    blocks = ("ttft_ms", "tpot_ms", "itl_ms", "time_between_chunks_ms", "e2e_ms", "request_output_tps")
    for name in (*blocks, "input_tokens", "output_tokens"):
        assert "#/$defs/Statistics" in json.dumps(client["properties"][name])
    for place in (described["$defs"]["Server"], described["$defs"]["Endpoint"]):
        assert set(QUANTITIES) <= set(place["properties"])


@pytest.mark.parametrize(
    ("name", "block", "fits"),
    [
        ("whole", dict.fromkeys(STATISTICS, 1.5) | {"count": 3}, True),
        ("one value", dict.fromkeys(STATISTICS, 1.5) | {"count": 1, "std": None, "missing": "one value"}, True),
        ("none", dict.fromkeys(STATISTICS) | {"count": 0, "missing": "no samples"}, True),
        ("none without a reason", dict.fromkeys(STATISTICS) | {"count": 0}, False),
        ("null of several", dict.fromkeys(STATISTICS, 1.5) | {"count": 3, "p99": None}, False),
        ("a statistic short", {"count": 3, "mean": 1.5}, False),
        ("one too many", dict.fromkeys(STATISTICS, 1.5) | {"count": 3, "p42": 1.5}, False),
    ],
)
def test_a_block_of_statistics_is_whole_or_says_why_not(name: str, block: dict[str, Any], fits: bool):
    """All of them, null only where there is a reason beside it."""
    described = schema.summary()
    statistics = {"$defs": described["$defs"], "$ref": "#/$defs/Statistics"}
    assert fits == (not errors(statistics, block)), name
