from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from codes import raises
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.plan.tokenizers import reference
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads import custom, distributions, mix
from sidelight.loadgen.plan.workloads.custom import parse_lengths
from sidelight.loadgen.plan.workloads.distributions import (
    BinnedDistribution,
    Choice,
    Distribution,
    Fixed,
    LogNormal,
    Normal,
    Percentiles,
    Uniform,
)
from sidelight.loadgen.plan.workloads.fields import WorkloadError

WHOLE = """
name: support desk
temperature: 0.5
content: words
output: {log-normal: {mu: 4.0, sigma: 0.5, max: 500}}
classes:
  - name: short
    weight: 3
    input: {uniform: {min: 64, max: 256}}
    system_prompt: {tokens: 50}
  - name: long
    weight: 1
    content: code
    input: {normal: {mean: 2000, std: 300, min: 1024, max: 4096}}
    output: 32
    prefixes: {count: 4, tokens: {uniform: {min: 100, max: 200}}, share: 0.5, zipf: 1.0}
    turns: {uniform: {min: 1, max: 4}}
    think_time_s: {histogram: {edges: [0.5, 1.5, 5.0], counts: [3, 1]}}
"""


def built(
    text: str, tmp_path: Path, *, count: int = 2000
) -> tuple[workloads.ReadyWorkload, list[workloads.WorkloadRequest]]:
    path = tmp_path / "desk.yaml"
    path.write_text(text, encoding="utf-8")
    workload = workloads.build(str(path), seed=3)
    return workload, list(itertools.islice(workload.requests, count))


def test_classes_are_mixed_by_weight_with_what_stands_above_them(tmp_path: Path):
    """Three of four are short; content, temperature and output come from the top where a class has none."""
    workload, requests = built(WHOLE, tmp_path)
    assert workload.label == "support desk (custom)"
    classes = Counter(request.workload_class for request in requests)
    assert set(classes) == {"short", "long"}
    assert abs(classes["short"] / len(requests) - 0.75) < 0.05
    short = [request for request in requests if request.workload_class == "short"]
    long = [request for request in requests if request.workload_class == "long"]
    assert all(64 + 50 <= request.input_tokens <= 256 + 50 and request.system is not None for request in short)
    assert all(request.max_tokens == 32 and request.temperature == 0.5 for request in long)
    assert all(1024 <= len(request.token_ids) <= 4096 for request in long)
    assert len({request.prefix for request in long if request.prefix}) == 4
    assert {0, 1, 2, 3} == {len(request.turns) for request in long}
    assert all(0.5 <= turn.think_s <= 5.0 for request in long for turn in request.turns)
    assert all(not request.turns for request in short)


def test_a_file_states_itself_in_the_manifest(tmp_path: Path):
    """Every class with its fraction and distributions, as plain JSON."""
    workload, _ = built(WHOLE, tmp_path, count=0)
    about = json.loads(json.dumps(workload.about))
    assert [("short", 0.75), ("long", 0.25)] == [(entry["name"], entry["fraction"]) for entry in about["classes"]]
    assert about["classes"][1]["turns"] == {"type": "uniform", "min": 1, "max": 4}
    assert about["source"] == "custom"


def test_one_class_needs_no_list(tmp_path: Path):
    """Input and output at the top are a whole workload."""
    _, requests = built("input: 100\noutput: {fixed: 7}\n", tmp_path, count=3)
    assert [(100, 7, "desk")] * 3 == [
        (request.input_tokens, request.max_tokens, request.workload_class) for request in requests
    ]


def test_long_context_of_the_drafts_other_range_can_be_written(tmp_path: Path):
    """Uniform(8192, 32768) with a question of one's own."""
    text = "content: words\ninput: {uniform: {min: 8192, max: 32768}}\noutput: 256\nquestion: ' What is it about?'\n"
    _, requests = built(text, tmp_path, count=20)
    assert all(8192 <= request.input_tokens <= 32_768 for request in requests)
    assert all(
        request.input_tokens - reference().count(request.suffix) == len(request.token_ids) for request in requests
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("input: 5", "output: is missing; add it"),
        ("input: five\noutput: 1", "input: 'five' is no distribution; write a number, or one of fixed, uniform"),
        ("input: 0\noutput: 1", "input: 0 must be at least 1"),
        ("input: 1.5\noutput: 1", "input: 1.5 must be a whole number"),
        ("input: {uniform: {min: 9, max: 3}}\noutput: 1", "input.uniform.min: 9 is above max 3; make it at most that"),
        ("input: {uniform: {min: 9}}\noutput: 1", "input.uniform.max: is missing; add it"),
        ("input: {uniform: [1, 2]}\noutput: 1", "input.uniform: [1, 2] must be a mapping; e.g. {min: 64, max: 256}"),
        ("input: {unifrom: {min: 1}}\noutput: 1", "input: {'unifrom': {'min': 1}} is no distribution; write a number"),
        ("input: {normal: {mean: 9, std: -1}}\noutput: 1", "input.normal.std: -1: expected `float` >= 0"),
        ("input: {normal: {mean: 9, sd: 2}}\noutput: 1", "input.normal.sd: unknown field (did you mean 'std'?)"),
        ("input: {log-normal: {mu: x, sigma: 1}}\noutput: 1", "input.log-normal.mu: 'x': expected `float`"),
        ("input: {percentiles: {50: 9, 95: 3}}\noutput: 1", "input.percentiles: {50: 9, 95: 3} must be two or more"),
        ("input: {percentiles: {0: 9, 95: 13}}\noutput: 1", "input.percentiles.0: 0 must be a percentile between 0"),
        ("input: {choice: {values: []}}\noutput: 1", "input.choice.values: []: expected `array` of length >= 1"),
        ("input: {choice: {values: [1, 2], weights: [1]}}\noutput: 1", "input.choice.weights: 1 of them for 2 values"),
        ("input: {choice: {values: [1, a]}}\noutput: 1", "input.choice.values[1]: [1, 'a']: expected `int | float`"),
        ("input: {histogram: {edges: [5, 1], counts: [1]}}\noutput: 1", "histogram.edges: [5, 1] must be two or more"),
        ("input: {histogram: {edges: [1, 5], counts: [0]}}\noutput: 1", "counts: [0.0] must have a positive sum"),
        ("inptu: 1\noutput: 1", "inptu: unknown field (did you mean 'input'?)"),
        ("input: 1\noutput: 1\ncontent: prose", "content: 'prose' is not known; known: random-tokens, words, code"),
        ("input: 1\noutput: 1\nturns: 0", "turns: 0 must be at least 1"),
        ("input: 1\noutput: 1\nthink_time_s: -1", "think_time_s: -1 must be at least 0"),
        ("input: 1\noutput: 1\nsystem_prompt: 200", "system_prompt: 200 must be a mapping of fields to values"),
        ("input: 1\noutput: 1\nprefixes: {tokens: 9, share: 80}", "prefixes.share: 80: expected `float` <= 1"),
        ("classes: {}", "classes: {}: expected `array"),
        ("classes: [{name: a, input: 1, output: .nan}]", "classes[0].output: nan must be a number"),
        ("classes: [{name: a, weight: 0, input: 1, output: 1}]", "classes[0].weight: 0: expected `float` > 0"),
        ("classes: [{input: 1, output: 1}]", "classes[0].name: is missing; add it"),
        ("{input: 1, output: 1, classes: [{name: a}, {name: a}]}", "classes[1].name: 'a' is another class's already"),
        ("[1]", "must be a mapping with input and output, or with classes"),
        ("a: [", "line 1, column 5: not YAML"),
        ("[" * 1000, "not YAML: nested too deeply"),
        (f"input: {10**400}\noutput: 1", "must be a number"),
    ],
)
def test_an_error_names_the_field_the_value_and_the_cure(text: str, says: str, tmp_path: Path):
    """And the file, in one line; it is raised before any request is made."""
    path = tmp_path / "w.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError) as raised:
        workloads.check(str(path))
    assert str(raised.value).startswith(str(path))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_workload_file_that_is_not_there_says_so(tmp_path: Path):
    """With the path."""
    with raises("file.unreadable"):
        workloads.check(str(tmp_path / "none.yaml"))


_PARAMETERS: dict[str, Any] = {
    "uniform": st.tuples(st.integers(1, 500), st.integers(0, 500)).map(lambda p: {"min": p[0], "max": p[0] + p[1]}),
    "normal": st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3)).map(lambda p: {"mean": p[0], "std": p[1], "max": 900}),
    "log-normal": st.tuples(st.floats(-50, 50), st.floats(0, 50)).map(lambda p: {"mu": p[0], "sigma": p[1]}),
    "percentiles": st.tuples(st.floats(1, 100), st.floats(1.01, 9)).map(lambda p: {50: p[0], 95: p[0] * p[1]}),
    "choice": st.lists(st.integers(1, 9), min_size=1).map(lambda values: {"values": values}),
    "histogram": st.integers(1, 500).map(lambda low: {"edges": [low, low + 1, low + 9], "counts": [0, 2]}),
}


@pytest.mark.parametrize("kind", _PARAMETERS)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_length_is_a_whole_number_within_its_bounds(kind: str, data: st.DataObject, seed: int):
    """Whatever the parameters are; and the same generator draws the same."""
    parameters = data.draw(_PARAMETERS[kind])
    bounds = custom.Bounds(least=1)
    read = custom.read_distribution({kind: parameters}, "x", bounds)
    lengths = distributions.whole(read, np.random.default_rng(seed), 50)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.max() <= parameters.get("max", distributions.MOST_TOKENS)
    assert lengths.tolist() == distributions.whole(read, np.random.default_rng(seed), 50).tolist()
    json.dumps(distributions.about(read))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda weights: sum(weights) > 0), st.integers(0, 99)
)
def test_nothing_without_weight_is_picked(weights: list[float], seed: int):
    """Positions are within the list."""
    for at in distributions.pick(np.random.default_rng(seed), tuple(weights), 20).tolist():
        assert weights[at] > 0


def test_one_class_does_not_disturb_another():
    """A class's requests are the same whatever stands beside it."""
    first, other = (
        custom.parse({"input": {"uniform": {"min": 1, "max": 99}}, "output": n}, name="w").classes[0] for n in (1, 2)
    )
    alone = list(itertools.islice(mix.requests([first], seed=5), 50))
    mixed = (request for request in mix.requests([first, other], seed=5) if request.max_tokens == 1)
    assert alone == list(itertools.islice(mixed, 50))


def test_the_documents_examples_are_workloads():
    """Every block of YAML in docs/reference/workloads.md can be read, and every distribution of its table."""
    text = (Path(__file__).parents[2] / "docs/reference/workloads.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        custom.parse(yaml.safe_load(block), name="example")
    rows = re.findall(r"^\| `(?:100` or `)?(\{[a-z-]+: .*?\})` \|", text, flags=re.MULTILINE)
    kinds = []
    for row in rows:
        written = yaml.safe_load(row)
        custom.read_distribution(written, "input", custom.Bounds(least=0))
        kinds += written
    assert list(custom.KINDS) == kinds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", Fixed(512)),
        ("fixed:512", Fixed(512)),
        ("uniform:128-1024", Uniform(128, 1024)),
        ("normal:512,64", Normal(512, 64)),
        ("normal:512,64,min=1,max=2048", Normal(512, 64, 1, 2048)),
        ("log-normal:5.5,1", LogNormal(5.5, 1)),
        ("log-normal: 5.5, 1.0, max=9", LogNormal(5.5, 1.0, 1, 9)),
        ("percentiles:50=156,95=892", Percentiles(((50, 156), (95, 892)))),
        ("percentiles:50=156,95=892,min=2", Percentiles(((50, 156), (95, 892)), 2)),
        ("choice:512,2048", Choice((512, 2048), (1, 1))),
        ("choice:512=3,2048=1", Choice((512, 2048), (3, 1))),
        ("histogram:1-100=30,100-500=70", BinnedDistribution((1, 100, 500), (30, 70))),
        ('{"uniform": {"min": 4, "max": 8}}', Uniform(4, 8)),
    ],
)
def test_lengths_in_an_option_are_those_of_a_file(text: str, expected: Distribution):
    """Each kind has a short notation, and one grammar has both."""
    assert expected == parse_lengths(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "many", "-1", "0", "1.5", "nan", "inf", "uniform", "uniform:5", "uniform:9-2", "uniform:1-2,3-4",
        "normal:5", "normal:1,2,3", "normal:a,b", "normal:5,-1", "poisson:5", "choice:", "choice:1,x",
        "percentiles:50=5", "histogram:0-10", "histogram:5=1", "histogram:0-10=1,x", "{", "{}", "[1]", "fixed:", ":",
        "=", "percentiles:5,6", "fixed:5,6", "choice:512=1,2048", "normal:512,64,mean=3", "percentiles:50=1,95=2,50=3",
        "histogram:1-100=30,200-500=70", "histogram:1-100=30,100-500=70,900", "histogram:1-2-3=4",
        "percentiles:50=1,95=2,3",
    ],
)  # fmt: skip
def test_lengths_that_cannot_be_read_say_what_can_be_written(text: str):
    """One line, whatever it was."""
    with pytest.raises(WorkloadError, match="write a number of tokens, or a distribution") as caught:
        parse_lengths(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_no_text_of_lengths_breaks_anything(text: str):
    """It is read, or refused."""
    with contextlib.suppress(WorkloadError):
        parse_lengths(text)


def test_a_truncated_distribution_is_drawn_again_outside_its_bounds():
    """Its bounds gather nothing, and bounds that hold next to nothing of it are refused."""
    given = {"mu": 5.5, "sigma": 1.0, "min": 1024, "max": 4096}
    bounds = custom.Bounds(least=1)
    drawn, clipped = (
        custom.read_distribution({"log-normal": given | {"truncated": truncated}}, "input", bounds)
        for truncated in (True, False)
    )
    lengths = distributions.whole(drawn, np.random.default_rng(1), 2000)
    assert 1024 <= lengths.min() < lengths.max() <= 4096
    assert (lengths == 1024).mean() < 0.01
    assert (distributions.whole(clipped, np.random.default_rng(1), 2000) == 1024).mean() > 0.9
    with raises("workload.truncated"):
        custom.read_distribution({"log-normal": given | {"mu": 0.0, "sigma": 0.1, "truncated": True}}, "input", bounds)
