"""`sidelight predict` on a run directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from played_runs import arrivals, engine, lengths, simulated, write
from processes import Ended
from processes import engine as serving
from series import scraped

from sidelight.scraper.series.log import ScrapeLog
from sidelight.sidecar.predict.result import schema
from sidelight.simulator.settings import PROFILES

Run = Callable[..., Ended]


def test_rates_and_settings_are_predicted(sidelight: Run, directory: Path) -> None:
    ended = sidelight(
        "predict", directory, "--rate", "x0.5,5", "--set", "max-num-seqs=32", "--known", "max-num-seqs=16",
        "--slo", "ttft_p99<2s", "--price", "2", "--json",
    )  # fmt: skip
    assert ended.code == 0
    predicted = json.loads(ended.out)
    jsonschema.validate(predicted, schema())
    loads = predicted["loads"]
    assert [(each["rate_per_s"], each["settings"]) for each in loads[2:]] == [(5.0, {}), (5.0, {"max-num-seqs": 32})]
    assert loads[0]["rate_per_s"] == pytest.approx(0.5 * 150 / predicted["duration_s"])
    assert loads[3]["ttft_ms"]["p99"]["estimate"] < loads[2]["ttft_ms"]["p99"]["estimate"]
    times = [time for each in loads for name in ("ttft_ms", "tpot_ms", "e2e_ms") for time in each[name].values()]
    assert len(times) == 4 * 9
    assert all(time["low"] < time["estimate"] < time["high"] for time in times)
    assert predicted["highest_rate"]["low"] <= predicted["highest_rate"]["estimate"]
    assert predicted["fit"]["step_ms"] == pytest.approx(8.0, rel=0.05)


def test_the_report_fits_a_terminal(sidelight: Run, directory: Path) -> None:
    ended = sidelight("predict", directory, "--known", "max-num-seqs=16")
    assert ended.code == 0
    assert ended.out.count("(90 % interval)") == 3
    assert max(map(len, ended.out.splitlines())) <= 100


def test_rates_without_a_prediction_may_meet_objectives(sidelight: Run, directory: Path) -> None:
    """Below some rate the run's time has too few requests, whatever the objective."""
    ended = sidelight("predict", directory, "--known", "max-num-seqs=16", "--rate", "x1", "--slo", "ttft_p99<1ms")
    assert "No rate that can be predicted meets ttft_p99<1ms." in ended.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--rate", "fast"), "option.value"),
        (("--rate", "x0"), "option.value"),
        (("--concurrency", "0"), "option.value"),
        (("--replicas", "two"), "option.value"),
        (("--set", "max-num-seqs"), "option.value"),
        (("--set", "seats=3"), "option.value"),
        (("--known", "max-num-seqs=0"), "option.value"),
        (("--known", "max-num-seqs=2"), "predict.refused"),
        (("--slo", "ttft"), "option.value"),
        (("--trace", "t", "--concurrency", "4"), "option.contradictory"),
        (("--trace", "t", "--arrival", "burst"), "option.contradictory"),
        (("--price", "nan"), "option.value"),
        (("--price", "-1"), "option.value"),
        (("--slo", "error_rate<1%"), "predict.slo"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    sidelight: Run, directory: Path, arguments: tuple[str, ...], code: str
) -> None:
    ended = sidelight("predict", directory, *arguments)
    assert ended.code == 2
    assert ended.err.rstrip().endswith(f"[{code}]")


def test_a_run_that_shows_no_engine_is_refused(sidelight: Run, tmp_path: Path) -> None:
    prompts, outputs = lengths(10, 1)
    write(tmp_path / "few", simulated(engine(), prompts, outputs, at_s=arrivals(10, 3.0, 1)), {"rate": 3.0})
    ended = sidelight("predict", tmp_path / "few")
    assert ended.code == 2
    assert ended.err.rstrip().endswith("[predict.refused]")


@pytest.mark.parametrize(("others", "code"), [(0, 0), (150, 2)])
def test_an_engine_that_served_others_too_is_refused(sidelight: Run, tmp_path: Path, others: int, code: int) -> None:
    prompts, outputs = lengths(150, 4)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(150, 3.0, 4))
    write(tmp_path / "run", exchanges, {"rate": 3.0, "arrival": "poisson"})
    log = ScrapeLog(tmp_path / "run/raw/scrapes-0.log")
    for at_ns, finished in ((exchanges[0].submit_ns - 1, 0), (exchanges[-1].end_ns + 10**11, 150 + others)):
        log.append(
            scraped(at_ns, f"# TYPE vllm:request_success_total counter\nvllm:request_success_total {finished}\n")
        )
    log.close()
    assert sidelight("predict", tmp_path / "run", "--rate", "2", "--known", "max-num-seqs=16").code == code


@pytest.mark.parametrize(("stated", "code"), [("True", 0), ("False", 0), ("", 2)])
def test_whether_shared_prompts_are_cached_is_on_the_page(
    sidelight: Run, directory: Path, tmp_path: Path, stated: str, code: int
) -> None:
    path = Path(shutil.copytree(directory, tmp_path / "run"))
    log = ScrapeLog(path / "raw/scrapes-0.log")
    label = f'{{enable_prefix_caching="{stated}"}}' if stated else ""
    log.append(scraped(10**18, f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{label} 1\n"))
    log.close()
    (tmp_path / "shared.yaml").write_text("input: 100\noutput: 20\nprefixes: {count: 2, tokens: 500}\n")
    asked = ("--rate", "1", "--known", "max-num-seqs=16,max-num-batched-tokens=1024")
    assert sidelight("predict", path, "--workload", str(tmp_path / "shared.yaml"), *asked).code == code


def test_a_predicted_load_is_sent_and_measured(sidelight: Run, tmp_path: Path) -> None:
    """With the run's own configuration; only the load of the last settings, which the server has."""
    prompts, outputs = lengths(60, 2, prompt=60, output=30)
    exchanges = simulated(engine(speed=PROFILES["fast"]), prompts, outputs, at_s=arrivals(60, 30.0, 2))
    config = {"rate": 30.0, "arrival": "poisson", "input_tokens": "60", "output_tokens": "8", "warmup": 0}
    write(tmp_path / "run", exchanges, config)
    with serving("--speed", "fast") as (url, _):
        ended = sidelight(
            "predict", tmp_path / "run", "--rate", "20", "--set", "max-num-seqs=16", "--validate", url, "--json"
        )
    assert ended.code == 0, ended.err
    predicted = json.loads(ended.out)
    jsonschema.validate(predicted, schema())
    as_it_was, changed = predicted["loads"]
    assert "measured" not in as_it_was
    assert set(changed["measured"]["ttft_ms"]) == {"p50", "p90", "p99"}
    assert 0 <= changed["measured"]["inside"] <= 9
    sent = json.loads((Path(changed["measured"]["directory"]) / "manifest.json").read_text())["config"]
    assert (sent["rate"], sent["input_tokens"], sent["url"]) == (20.0, "60", [url])


@pytest.mark.parametrize(("prompt", "known", "shows"), [(300, "", True), (30, "", False), (30, "512", True)])
def test_whether_the_budget_showed_is_said(
    sidelight: Run, tmp_path: Path, prompt: int, known: str, *, shows: bool
) -> None:
    prompts, outputs = lengths(150, 4, prompt=prompt)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(150, 3.0, 4))
    write(tmp_path / "run", exchanges, {"rate": 3.0, "arrival": "poisson"})
    stated = "max-num-seqs=16" + (f",max-num-batched-tokens={known}" if known else "")
    fit = json.loads(sidelight("predict", tmp_path / "run", "--rate", "3", "--known", stated, "--json").out)["fit"]
    assert fit["shows_budget"] is shows


def test_a_replayed_trace_at_twice_its_rate_ends_sooner(sidelight: Run, tmp_path: Path) -> None:
    """No more requests are sent than it has."""
    prompts, outputs = lengths(150, 4)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(150, 1.5, 4))
    write(tmp_path / "run", exchanges, {"rate": "1x", "arrival": "replay", "trace": "t.jsonl"})
    ended = sidelight("predict", tmp_path / "run", "--rate", "x2", "--known", "max-num-seqs=16", "--json")
    assert json.loads(ended.out)["loads"][0]["requests_per_s"] == pytest.approx(3.0, rel=0.08)
    many = sidelight(
        "predict", tmp_path / "run", "--rate", "x2", "--replicas", "8", "--known", "max-num-seqs=16", "--json"
    )
    assert "refused" in json.loads(many.out)["loads"][0]


def test_a_server_that_does_not_answer_measures_nothing(sidelight: Run, directory: Path) -> None:
    ended = sidelight(
        "predict", directory, "--rate", "2", "--validate", "http://127.0.0.1:9", "--known", "max-num-seqs=16"
    )
    assert ended.code == 2
    assert ended.err.rstrip().endswith("[predict.validate]")
