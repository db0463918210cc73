from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import pytest
from scipy import stats

from sidelight.loadgen.plan.tokenizers import reference
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads.distributions import zipf_weights
from sidelight.loadgen.plan.workloads.request import WorkloadRequest

COUNT = 4000
# Of all checks below none is to fail by chance more often than about once in ten thousand seeds.
DEVIATIONS = 4.5
PERCENTS = (5, 25, 50, 75, 90, 95, 99)
MADE = ("synthetic-uniform", "synthetic-skewed", "conversation", "code-completion", "long-context", "siclait")


def generate_synthetic_uniform(n_requests, seed=42):  # noqa: ANN001  # the appendix's pseudocode
    rng = random.Random(seed)
    requests = []
    for _ in range(n_requests):
        input_len = rng.randint(128, 512)
        output_len = rng.randint(64, 256)
        input_tokens = [rng.randint(0, 100255) for _ in range(input_len)]
        requests.append({"input_tokens": input_tokens, "max_tokens": output_len, "temperature": 0.0})
    return requests


def drawn(name: str, count: int = COUNT, *, seed: int = 42) -> list[WorkloadRequest]:
    return list(itertools.islice(workloads.build(name, seed=seed).requests, count))


def assert_percentiles(values: Sequence[int], expected: dict[float, float]) -> None:
    """Each percentile is within its binomial sampling error; whole numbers may sit on it."""
    for percent, value in expected.items():
        q = percent / 100
        error = DEVIATIONS * math.sqrt(q * (1 - q) / len(values))
        below = sum(number < round(value) for number in values) / len(values)
        not_above = sum(number <= round(value) for number in values) / len(values)
        assert below - error <= q <= not_above + error, f"P{percent} is not {value}"


def assert_share(hits: int, count: int, expected: float) -> None:
    assert abs(hits / count - expected) <= DEVIATIONS * math.sqrt(expected * (1 - expected) / count)


def log_normal(mu: float, sigma: float, least: float, most: float) -> dict[float, float]:
    return {p: min(max(math.exp(mu + sigma * NormalDist().inv_cdf(p / 100)), least), most) for p in PERCENTS}


def test_synthetic_uniform_is_the_appendix_to_the_letter():
    """1000 requests for seed 42 have the token ids, lengths and temperature of the draft's pseudocode."""
    ours = itertools.islice(workloads.build("synthetic-uniform", seed=42).requests, 1000)
    expected = generate_synthetic_uniform(1000, seed=42)
    actual = [
        {"input_tokens": list(request.token_ids), "max_tokens": request.max_tokens, "temperature": request.temperature}
        for request in ours
    ]
    assert expected == actual
    assert all(request.input_tokens == len(request.token_ids) for request in drawn("synthetic-uniform", 50, seed=7))


def test_synthetic_uniform_is_the_same_everywhere():
    """The digest of those 1000 requests, as the pseudocode gave it when this was written."""
    ours = [[*request.token_ids, request.max_tokens] for request in drawn("synthetic-uniform", 1000)]
    assert DIGEST == hashlib.sha256(json.dumps(ours).encode()).hexdigest()


DIGEST = "932cfe66bcb8e16eb3c7992f65039af9495ca7f72ccb23be2ce507c9ef657eb1"


def test_synthetic_skewed_has_the_appendixs_lengths():
    """LogNormal(5.5, 1.0) in [32, 4096] in, LogNormal(4.5, 1.2) in [16, 2048] out, no sharing, temperature 0."""
    requests = drawn("synthetic-skewed")
    assert_percentiles([request.input_tokens for request in requests], log_normal(5.5, 1.0, 32, 4096))
    assert_percentiles([request.max_tokens for request in requests], log_normal(4.5, 1.2, 16, 2048))
    assert (32, 4096) == (
        min(request.input_tokens for request in requests),
        max(request.input_tokens for request in requests),
    )
    assert (16, 2048) == (
        min(request.max_tokens for request in requests),
        max(request.max_tokens for request in requests),
    )
    assert {(None, None, 0.0)} == {(request.system, request.prefix, request.temperature) for request in requests}


def test_the_conversations_stand_in_has_the_references_percentiles():
    """Input 156/892/2134 and output 234/789/1567 at P50/P95/P99; half of the requests share one 200-token prompt."""
    requests = drawn("conversation", 5 * COUNT)
    own_tokens = [request.input_tokens - (request.system.tokens if request.system else 0) for request in requests]
    assert_percentiles(own_tokens, {50: 156, 95: 892, 99: 2134})
    assert_percentiles([request.max_tokens for request in requests], {50: 234, 95: 789, 99: 1567})
    systems = [request.system for request in requests if request.system is not None]
    assert_share(len(systems), len(requests), 0.5)
    assert len(set(systems)) == 1
    assert (200, 200) == (systems[0].tokens, reference().count(reference().text(systems[0].token_ids)))


def test_code_completions_stand_in_shares_repositories_as_the_appendix_has_it():
    """80 % share one of ten contexts of 512 to 1024 tokens by Zipf, s = 1.5; output LogNormal(4.0, 1.5)."""
    requests = drawn("code-completion")
    assert_percentiles([request.max_tokens for request in requests], log_normal(4.0, 1.5, 1, 4096))
    prefixes = Counter(request.prefix for request in requests if request.prefix is not None)
    assert_share(prefixes.total(), len(requests), 0.8)
    assert len(prefixes) == 10
    assert all(512 <= prefix.tokens == len(prefix.token_ids) <= 1024 for prefix in prefixes)
    by_rank = [prefixes[prefix] for prefix in sorted(prefixes, key=lambda prefix: prefix.name)]
    expected = [prefixes.total() * weight for weight in zipf_weights(10, 1.5)]
    assert stats.chisquare(by_rank, expected).pvalue > 1e-4


def test_long_context_draws_its_targets_evenly():
    """Five target lengths; a document of the target minus 100 tokens, then a question of 100; 256 tokens out."""
    requests = drawn("long-context", 200)
    targets = Counter(request.input_tokens for request in requests)
    assert {8192, 16_384, 32_768, 65_536, 131_072} == set(targets)
    assert stats.chisquare(list(targets.values())).pvalue > 1e-4
    assert all(request.input_tokens - 100 == len(request.token_ids) for request in requests)
    assert all(256 == request.max_tokens for request in requests)
    assert reference().count(requests[0].suffix) == 100


def test_siclaits_lengths_are_normal():
    """Mean 100, standard deviation 20, ids over the whole vocabulary."""
    requests = drawn("siclait")
    normal = NormalDist(100, 20)
    assert_percentiles([request.input_tokens for request in requests], {p: normal.inv_cdf(p / 100) for p in PERCENTS})
    ids = [token for request in requests[:200] for token in request.token_ids]
    assert stats.kstest(ids, stats.randint(0, 100_256).cdf).pvalue > 1e-4


@pytest.mark.parametrize("name", ["conversation", "code-completion", "long-context"])
def test_made_texts_encode_to_the_ids_they_were_made_from(name: str):
    """So the declared length is the text's own; random ids cannot promise that."""
    for request in drawn(name, 100 if name != "long-context" else 3):
        pieces = [
            request.token_ids[:-1],
            *(piece.token_ids[:-1] for piece in (request.system, request.prefix) if piece),
        ]
        for ids in pieces:
            # The last token may be half of a word.
            assert abs(reference().count(reference().text(ids)) - len(ids)) <= 1


@pytest.mark.parametrize("name", MADE)
def test_the_same_seed_gives_the_same_requests(name: str):
    """And another seed others; a longer sequence begins with the shorter."""
    assert drawn(name, 5) == drawn(name, 20)[:5]
    assert drawn(name, 5) != drawn(name, 5, seed=43)


@pytest.mark.parametrize("name", MADE)
def test_a_workload_states_what_the_draft_demands(name: str):
    """Lengths with their type, content, sharing, seed; plain JSON; a stand-in is labelled as such."""
    workload = workloads.build(name, seed=42)
    about = json.loads(json.dumps(workload.about))
    assert (42, workload.label) == (about["seed"], about["name"])
    class_ = about["classes"][0]
    assert {"input_tokens", "output_tokens", "content", "temperature", "system_prompt", "shared_prefix"} <= set(class_)
    assert class_["output_tokens"]["control"] == "max_tokens"
    stand_in = name in ("conversation", "code-completion")
    assert (f"{name} (synthetic stand-in)" if stand_in else name) == workload.label
    assert stand_in == any("--dataset" in note for note in workload.notes)


def test_an_unknown_workload_lists_the_names_and_the_nearest():
    """The error is raised at the call, not at the first request."""
    with pytest.raises(
        workloads.WorkloadError, match=r"did you mean 'synthetic-uniform'\?\); known: synthetic-uniform"
    ):
        workloads.build("synthetic-unifrom", seed=1)


@pytest.mark.parametrize(
    ("name", "domain", "language"),
    [
        ("synthetic-uniform", "none: random tokens", "none"),
        ("conversation", "none: common words in sentences without meaning", "English"),
        ("code-completion", "source code made from templates", "Python, JavaScript, TypeScript"),
        ('{"input": 5, "output": 1, "content": "repeat"}', "none: one word over and over", "English"),
    ],
)
def test_a_workload_states_domain_and_language(name: str, domain: str, language: str):
    """As the draft wants of its content; stand-ins have none of what they stand for."""
    (stated,) = workloads.build(name, seed=1).about["classes"]
    assert (stated["domain"], stated["language"]) == (domain, language)
