"""The published schema of the JSON export: ours fits whatever was scraped, and where AIPerf's own file differs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from exports import Recorded, S, source_of
from jsonschema import Draft202012Validator
from series import endpoint_of

from sidelight.exporter.server_metrics.json import document

REPOSITORY = Path(__file__).parents[2]

SCHEMA = json.loads((REPOSITORY / "exporter/server_metrics.schema.json").read_text(encoding="utf-8"))


def errors(instance: object) -> list[str]:
    """Return what the schema objects to."""
    faults = Draft202012Validator(SCHEMA).iter_errors(instance)
    return sorted(f"{list(error.absolute_path)}: {error.message}" for error in faults)


def test_it_is_a_schema():
    """Of the dialect that it names, and it says of every object whether more may stand in it."""
    Draft202012Validator.check_schema(SCHEMA)

    def objects(node: Any) -> list[Any]:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        here = [node] if isinstance(node, dict) and "object" in str(node.get("type")) else []
        return here + [item for child in inner for item in objects(child)]

    assert [] == [node for node in objects(SCHEMA) if "additionalProperties" not in node]


@pytest.mark.parametrize("slice_s", [1, 10, 1000])
def test_a_recorded_run_fits(recorded: Recorded, slice_s: int):
    """Whatever the slices: shorter than an update, usual, longer than the run."""
    assert [] == errors(document(source_of(recorded[1], slice_ns=slice_s * S)))


ODD = """# TYPE a_total counter
a_total {0}
# TYPE g gauge
g{{x="y"}} {1}
untyped {1}
# TYPE h_seconds histogram
h_seconds_bucket{{le="1.0"}} {0}
h_seconds_bucket{{le="+Inf"}} {0}
h_seconds_sum {1}
h_seconds_count {0}
# TYPE empty histogram
empty_bucket{{le="+Inf"}} 0
empty_sum 0
empty_count 0
# TYPE s summary
s_sum {1}
s_count {0}
"""


@pytest.mark.parametrize(
    "values",
    [[(1, 1)] * 3, [(1, 1), (2, 1e308), (4, -1e308)], [(5, 1), (1, "NaN"), (3, "+Inf")], [(0, 0), (1, -3)]],
    ids=["constant", "large", "reset", "negative"],
)
def test_odd_pages_fit(values: list[tuple[float, object]]):
    """Constants, resets, what is not finite or too large, an endpoint that never answered, and no window at all."""
    endpoint = endpoint_of([ODD.format(*pair) for pair in values])
    dead = endpoint_of([""], url="http://127.0.0.1:9/metrics")
    exported = document(source_of(endpoint, dead, slice_ns=S))
    assert [] == errors(exported)
    assert {"a", "empty", "h_seconds"} <= set(exported["metrics"])
    assert [] == errors(document(source_of(endpoint, start_ns=S, end_ns=S)))


def test_what_breaks_the_contract_does_not_fit(recorded: Recorded):
    """A misspelt statistic, a null, a wrong type and an empty list of series are found."""
    whole = document(source_of(recorded[1], slice_ns=10 * S))
    counter = ("metrics", "vllm:generation_tokens", "series", 0, "stats")
    for path, name, value in [
        (counter, "rate_p99", 1.0),
        (counter, "rate", None),
        (("metrics", "vllm:generation_tokens"), "type", "histogram"),
        (("metrics", "vllm:generation_tokens"), "series", []),
        (("summary",), "start_time", "today"),
        ((), "extra", 1),
    ]:
        broken = copy.deepcopy(whole)
        place: Any = broken
        for step in path:
            place = place[step]
        place[name] = value
        assert errors(broken), name


def test_a_real_file_differs_in_what_is_listed_here(reference: Path):
    """AIPerf 0.13.0: a later version of its format, with what it says of phases, and without our `generator`."""
    theirs = json.loads((reference / "server_metrics_export.json").read_text())
    assert [
        "['schema_version']: '1.0' was expected",
        "['summary']: Additional properties are not allowed ('phase_time_ranges' was unexpected)",
        "[]: 'generator' is a required property",
        "[]: Additional properties are not allowed ('metrics_phase', 'warmup_metrics' were unexpected)",
    ] == errors(theirs)
