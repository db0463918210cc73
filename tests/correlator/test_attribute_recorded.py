"""Estimates from scrapes of a real vLLM against its own spans, which the estimator does not see."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from correlator.attribute import attribute
from correlator.attribution import Attribution
from correlator.server_percentiles import ServerPercentiles, server_percentiles
from scraper.endpoint import Scrape
from scraper.exposition import Series
from scraper.log import rows
from scraper.series import EndpointSeries, build

REPOSITORY = Path(__file__).parents[2]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The columns of a request log that the estimator reads."""

    submit_ns: Ints
    first_output_ns: Ints
    first_token_ns: Ints
    end_ns: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    status: Texts
    finish_reason: Texts
    endpoint_url: Texts
    chunk_ns: Ints
    chunk_start: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Requests, scrapes, and the truth in s, NaN where no span tells it."""

    requests: Requests
    scrapes: tuple[EndpointSeries, ...]
    queue_s: Floats
    prefill_s: Floats

    def every(self, nth: int) -> Recording:
        """Keep every nth scrape."""
        (endpoint,) = self.scrapes
        names = ("tick_ns", "request_ns", "response_ns", "at_ns", "values", "changed")
        kept = replace(endpoint, **{name: getattr(endpoint, name)[::nth] for name in names})
        return replace(self, scrapes=(kept,))

    def withheld(self, hidden: npt.NDArray[np.bool_]) -> Recording:
        """Leave out the client's records of some requests."""
        seen = ~hidden
        sizes = np.diff(self.requests.chunk_start)
        columns = {name: getattr(self.requests, name)[seen] for name in Requests.__slots__ if "chunk" not in name}
        requests = Requests(
            **columns,
            chunk_ns=self.requests.chunk_ns[np.repeat(seen, sizes)],
            chunk_start=np.concatenate([[0], np.cumsum(sizes[seen])]),
        )
        return replace(self, requests=requests, queue_s=self.queue_s[seen], prefill_s=self.prefill_s[seen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of one part in ms, as the figures of the issue name them."""

    p95_ms: float
    wape: float
    covered: float
    wrong_exact: int


def errors(recording: Recording, table: Attribution, part: str) -> Errors:
    """Compare with the truth where there is one."""
    truth, found, sd = getattr(recording, f"{part}_s"), getattr(table, f"{part}_s"), getattr(table, f"{part}_sd_s")
    known = np.isfinite(truth) & np.isfinite(found)
    error = np.abs(found - truth)[known]
    return Errors(
        p95_ms=1e3 * float(np.percentile(error, 95)),
        wape=float(error.sum() / truth[known].sum()),
        covered=float((error <= 1.645 * sd[known] + 1e-6).mean()),
        wrong_exact=int((error[table.quality[known] == "exact"] > 2e-3).sum()),
    )


@pytest.fixture(scope="session")
def overload() -> Recording:
    """The overload phase of the recording `main`: 161 requests, 190 scrapes at 0.2 s."""
    with np.load(REPOSITORY / "tests/data/vllm_overload.npz") as file:
        data = {name: file[name] for name in file.files}
    start_ns = int(data["start_ns"])
    size = len(data["submit_ns"])
    request_ns, response_ns = data["scrape_request_ns"] + start_ns, data["scrape_response_ns"] + start_ns
    series = tuple(
        Series(name=name, labels=tuple((key, value) for key, value in labels), family=family, type=kind, help="")
        for name, labels, family, kind in json.loads(str(data["series"]))
    )
    endpoint = EndpointSeries(
        url="http://engine.test/metrics",
        tick_ns=request_ns,
        request_ns=request_ns,
        response_ns=response_ns,
        at_ns=request_ns + (response_ns - request_ns) // 2,
        series=series,
        values=data["scrape_values"],
        changed=np.ones(len(request_ns), dtype=np.bool_),
        failures=(),
    )
    requests = Requests(
        submit_ns=data["submit_ns"] + start_ns,
        first_output_ns=data["first_output_ns"] + start_ns,
        first_token_ns=data["first_output_ns"] + start_ns,
        end_ns=data["end_ns"] + start_ns,
        input_tokens=data["input_tokens"],
        output_tokens=data["output_tokens"],
        cached_tokens=np.full(size, -1),
        status=np.full(size, "ok", dtype=np.object_),
        finish_reason=np.full(size, "length", dtype=np.object_),
        endpoint_url=np.full(size, "http://engine.test/v1", dtype=np.object_),
        chunk_ns=np.cumsum(data["chunk_ns"]) + start_ns,
        chunk_start=data["chunk_start"],
    )
    return Recording(requests=requests, scrapes=(endpoint,), queue_s=data["queue_s"], prefill_s=data["prefill_s"])


@pytest.fixture(scope="session")
def main() -> Recording:
    """The whole recording `main`; what needs it is skipped where it is absent."""
    path = Path(os.environ.get("SIDELIGHT_SHARED", REPOSITORY.parent / "shared")) / "fixtures/vllm/recorded/main"
    if not path.is_dir():
        pytest.skip(f"no recording at {path}")
    anchor = json.loads((path / "load_meta.json").read_text(encoding="utf-8"))["anchor_start"]
    offset_ns = anchor["unix_ns"] - anchor["mono_ns"]
    made = list(lines(path / "requests.jsonl.gz"))
    spans = {one["trace_id"]: one["attributes"] for one in lines(path / "spans.jsonl.gz")}
    chunks = [[event[0] + offset_ns for event in one["events"] if event[3]] for one in made]

    def stamps(name: str) -> Ints:
        return np.array([one[name] + offset_ns for one in made], dtype=np.int64)

    def told(name: str) -> Floats:
        return np.array([spans[one["trace_id"]][f"gen_ai.latency.time_in_{name}"] for one in made])

    requests = Requests(
        submit_ns=stamps("submit_ns"),
        first_output_ns=stamps("first_token_ns"),
        first_token_ns=stamps("first_token_ns"),
        end_ns=stamps("done_ns"),
        input_tokens=np.array([one["usage"]["prompt_tokens"] for one in made]),
        output_tokens=np.array([one["usage"]["completion_tokens"] for one in made]),
        cached_tokens=np.full(len(made), -1),
        status=np.full(len(made), "ok", dtype=np.object_),
        finish_reason=np.full(len(made), "length", dtype=np.object_),
        endpoint_url=np.full(len(made), "http://engine.test/v1", dtype=np.object_),
        chunk_ns=np.array([one for part in chunks for one in part], dtype=np.int64),
        chunk_start=np.concatenate([[0], np.cumsum([len(part) for part in chunks])]),
    )
    return Recording(
        requests=requests,
        scrapes=build(rows(recorded_scrapes(path / "scrapes.jsonl.gz", offset_ns))),
        queue_s=told("queue"),
        prefill_s=told("model_prefill"),
    )


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def recorded_scrapes(path: Path, offset_ns: int) -> Iterator[Scrape]:
    """Read the pages; the first line is an anchor."""
    for one in lines(path):
        if "k" in one:
            yield Scrape(
                url="http://engine.test/metrics",
                tick_ns=one["due_ns"] + offset_ns,
                request_ns=one["t0_ns"] + offset_ns,
                response_ns=one["t1_ns"] + offset_ns,
                status=one["status"],
                content_type=one["ctype"],
                body=one["body"].encode(),
                error="",
            )


def test_an_overloaded_engine_is_attributed_at_5_hz(overload: Recording):
    """161 requests with a queue of 3 s on average: off by less than the figures, exact ones right."""
    table = attribute(overload.requests, overload.scrapes)
    queue, prefill = errors(overload, table, "queue"), errors(overload, table, "prefill")

    assert (0, 0) == (queue.wrong_exact, prefill.wrong_exact)
    assert queue.p95_ms < 30
    assert max(queue.wape / 0.005, prefill.wape / 0.06) < 1
    assert min(queue.covered, prefill.covered) > 0.85


@pytest.mark.parametrize(("nth", "queue_p95_ms", "prefill_wape"), [(1, 17, 0.04), (5, 38, 0.10), (25, 43, 0.12)])
def test_the_whole_recording_is_attributed_within_the_figures(
    main: Recording, nth: int, queue_p95_ms: float, prefill_wape: float
):
    """At 0.2, 1 and 5 s: idle, closed loop, under- and overload in one run."""
    thinned = main.every(nth)
    table = attribute(thinned.requests, thinned.scrapes)
    queue, prefill = errors(thinned, table, "queue"), errors(thinned, table, "prefill")

    assert queue.p95_ms < queue_p95_ms
    assert prefill.wape < prefill_wape
    assert (0, 0) == (queue.wrong_exact, prefill.wrong_exact)
    assert queue.covered > 0.85
    assert prefill.covered > 0.80


@pytest.mark.parametrize("seed", range(4))
def test_withheld_records_are_flagged_as_strangers(main: Recording, seed: int):
    """With 30 % of the requests unknown, intervals that hold one are never called exact, and errors stay in bounds."""
    hidden = np.random.default_rng(np.random.SeedSequence(seed)).random(len(main.queue_s)) < 0.3
    shared = main.every(5).withheld(hidden)
    table = attribute(shared.requests, shared.scrapes)
    queue, prefill = errors(shared, table, "queue"), errors(shared, table, "prefill")

    assert (table.quality == "foreign").mean() > 0.7
    assert (0, 0) == (queue.wrong_exact, prefill.wrong_exact)
    assert queue.p95_ms < 1.3 * 50
    assert max(queue.wape / 0.0091, prefill.wape / 0.182) < 1
    assert min(queue.covered / 0.85, prefill.covered / 0.8) > 1


@pytest.mark.parametrize("nth", [1, 3])
def test_means_of_slices_are_off_by_less_than_a_millisecond(main: Recording, nth: int):
    """Slices of 5 s by submission, queue and prefill."""
    thinned = main.every(nth)
    table = attribute(thinned.requests, thinned.scrapes)
    slices = (thinned.requests.submit_ns - thinned.requests.submit_ns.min()) // (5 * 10**9)
    off_ms = {
        part: [
            1e3 * abs(float(np.mean((getattr(table, part) - getattr(thinned, part))[slices == one])))
            for one in np.unique(slices)
        ]
        for part in ("queue_s", "prefill_s")
    }

    assert max(float(np.mean(off)) for off in off_ms.values()) < 1


def test_the_queues_share_of_the_variance_of_ttft_is_that_of_the_truth(main: Recording):
    table = attribute(main.every(5).requests, main.every(5).scrapes)
    wait_s = (main.requests.first_output_ns - main.requests.submit_ns) / 1e9

    def share(queue_s: Floats) -> float:
        return float(np.cov(queue_s, wait_s)[0, 1] / np.var(wait_s, ddof=1))

    assert share(main.queue_s) == pytest.approx(share(table.queue_s), abs=0.05)


def test_percentiles_are_read_off_the_clients_spans(main: Recording):
    """A first bucket of 0.3 s says nothing of a prefill of 54 ms; the estimates at 1 s do."""
    thinned = main.every(5)
    table = attribute(thinned.requests, thinned.scrapes)

    for part, allowed in (("queue", (0.001, 0.02, 0.02)), ("prefill", (0.1, 0.1, 0.1))):
        found = server_percentiles(table, thinned.scrapes, part, [0.5, 0.9, 0.99])
        assert isinstance(found, ServerPercentiles)
        assert ("client spans", 1.0) == (found.source, found.covered_ratio)
        truth = np.quantile(getattr(main, f"{part}_s"), [0.5, 0.9, 0.99])
        assert (np.abs(found.values_s - truth) <= np.array(allowed) * np.maximum(truth, 1.0 * (part == "queue"))).all()
        assert (found.low_s <= found.values_s).all()
        assert (found.values_s <= found.high_s).all()


def test_percentiles_of_an_engine_that_others_use_stay_those_of_its_buckets(main: Recording):
    """Our requests do not speak of strangers."""
    shared = main.every(5).withheld(np.arange(len(main.queue_s)) % 3 == 0)
    table = attribute(shared.requests, shared.scrapes)

    found = server_percentiles(table, shared.scrapes, "queue", [0.5])

    assert isinstance(found, ServerPercentiles)
    assert "buckets and sums" == found.source
    assert 0.6 < found.covered_ratio < 0.7
