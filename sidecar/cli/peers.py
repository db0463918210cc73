"""What the options of AIPerf, GuideLLM and `vllm bench serve` are called here: most are renamed, some are not needed,
and the rest name what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from loadgen.protocols import PROTOCOLS

COMMANDS = ("bench", "benchmark", "profile", "serve")

# The same option under another name; its value stays.
RENAMED = {
    "-u": "--url", "--base-url": "--url", "--target": "--url",
    "-m": "--model", "--model-names": "--model",
    "-H": "--header", "--headers": "--header",
    "--isl": "--input-tokens", "--random-input-len": "--input-tokens", "--input-len": "--input-tokens",
    "--synthetic-input-tokens-mean": "--input-tokens", "--prompt-input-tokens-mean": "--input-tokens",
    "--osl": "--output-tokens", "--random-output-len": "--output-tokens", "--output-len": "--output-tokens",
    "--output-tokens-mean": "--output-tokens", "--prompt-output-tokens-mean": "--output-tokens",
    "--request-rate": "--rate", "--max-concurrency": "--concurrency",
    "--request-count": "--requests", "--num-requests": "--requests", "--num-prompts": "--requests",
    "--max-requests": "--requests",
    "--benchmark-duration": "--duration", "--max-seconds": "--duration",
    "--benchmark-grace-period": "--drain-timeout", "--request-timeout-seconds": "--request-timeout",
    "--num-warmups": "--warmup", "--warmup-request-count": "--warmup", "--num-warmup-requests": "--warmup",
    "--random-seed": "--seed", "--processor": "--tokenizer",
    "--input-file": "--prompts", "--dataset-path": "--prompts",
    "--arrival-smoothness": "--burstiness", "--vllm-burstiness": "--burstiness",
    "--ramp-up-strategy": "--ramp", "--ramp-up-start-rps": "--rate", "--ramp-up-end-rps": "--ramp-to",
    "--server-metrics": "--metrics", "--server-metrics-formats": "--formats",
    "--artifact-dir": "--out", "--output-artifact-dir": "--out", "--result-dir": "--out", "--output-dir": "--out",
}  # fmt: skip

_APIS = {name: name for name in PROTOCOLS}
_PATHS = {protocol.path: name for name, protocol in PROTOCOLS.items()}
_PROFILES = {"poisson": "poisson", "constant": "uniform", "async": "uniform", "gamma": "gamma"}
_FILES = "a file of prompts is --prompts FILE, a trace --trace FILE, a known data set --workload NAME --dataset FILE"
_BY_LOOK = "--prompts knows a file by its look"
_STREAMS = (
    "a number of streams is --concurrency N, and a rate --rate R; a sweep is a study: sidelight test throughput URL "
    "--scale short"
)
# An option whose values have other names here, and what to write in place of a value that is not listed.
VALUES: dict[str, tuple[str, dict[str, str], str]] = {
    "--endpoint-type": ("--endpoint", _APIS, "choose an API with --endpoint; `sidelight run --help` lists them"),
    "--backend": (
        "--endpoint",
        {"openai-chat": "chat", **dict.fromkeys(("openai", "vllm"), "completions")},
        "give the server with --url URL, the model with --model and the API with --endpoint",
    ),
    "--endpoint": ("--endpoint", _PATHS, ""),
    "--request-rate-mode": ("--arrival", _PROFILES, "choose with --arrival poisson, uniform or gamma"),
    "--arrival-pattern": ("--arrival", _PROFILES, "choose with --arrival poisson, uniform or gamma"),
    "--rate-type": ("--arrival", _PROFILES, _STREAMS),
    "--profile": ("--arrival", _PROFILES, _STREAMS),
    "--dataset-name": (
        "",
        {"random": "prompts are random by default", "custom": _BY_LOOK, "sharegpt": _BY_LOOK},
        _FILES,
    ),
    "--custom-dataset-type": ("", {"single_turn": _BY_LOOK, "multi_turn": _BY_LOOK}, _FILES),
}

# Fields of every request's body, each by the option that has its value; --extra-inputs has their names with them.
BODY_FIELDS = {
    f"--{name.replace('_', '-')}": name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"
    )
}  # fmt: skip
EXTRA_INPUTS = "--extra-inputs"

# Standard deviations, each with the option whose mean it belongs to.
DEVIATIONS = {
    f"--{name}": mean
    for mean, names in (
        ("--input-tokens", ("isl-stddev", "synthetic-input-tokens-stddev", "prompt-input-tokens-stddev")),
        ("--output-tokens", ("osl-stddev", "output-tokens-stddev", "prompt-output-tokens-stddev")),
    )
    for name in names
}

_ALWAYS_WRITTEN = "all results are always written to the run directory"
_ALL_SHOWN = "every metric is reported with its percentiles"
_NO_DISPLAY = "--quiet prints the result only"
# Options that change nothing here, without a value and with one, each with the reason.
FLAGS_NOT_NEEDED = {
    "--streaming": "replies are always streamed",
    "--use-server-token-count": "tokens of replies are the server's usage",
    "--use-legacy-max-tokens": "max_tokens is what is sent",
    "--save-result": _ALWAYS_WRITTEN,
    "--save-detailed": _ALWAYS_WRITTEN,
    "--append-result": _ALWAYS_WRITTEN,
    "--export-http-trace": _ALWAYS_WRITTEN,
    "--show-trace-timing": _ALWAYS_WRITTEN,
    "--detect-saturation": "the report says by itself that a system was overloaded",
    "--no-gpu-telemetry": "power is read from this machine only, and only where it can be",
    "--disable-tqdm": _NO_DISPLAY,
    "--disable-progress": _NO_DISPLAY,
    "--disable-console": _NO_DISPLAY,
    "--disable-console-interactive": _NO_DISPLAY,
    "--trust-remote-code": "no code of a model is run",
    "--disable-shuffle": "prompts of a file are sent in its order",
    "--no-oversample": "a file's prompts are sent once each, unless more are asked for",
    "--tokenizer-trust-remote-code": "no code of a model is run",
    "--skip-tokenizer-init": "a tokenizer is needed for the lengths of prompts only",
}
NOT_NEEDED = {
    "--ui": _NO_DISPLAY,
    "--ui-type": _NO_DISPLAY,
    "--percentile-metrics": _ALL_SHOWN,
    "--metric-percentiles": _ALL_SHOWN,
    "--export-level": _ALWAYS_WRITTEN,
    "--profile-export-level": _ALWAYS_WRITTEN,
    "--tokenizer-mode": "a tokenizer.json says itself what it is",
    "--backend-type": "the API is chosen with --endpoint",
    "--num-dataset-entries": "AIPerf's --num-prompts, too: prompts do not repeat",
    "--ready-check-timeout-sec": "the server is asked before each run, and must answer",
    "--log-level": "--verbose shows where an error came from",
    "--label": "a run is named by its directory, --out DIR",
}


def _synthetic(value: str) -> str:
    """Say how GuideLLM's description of data is written here."""
    fields = dict(re.findall(r"(\w+)\s*[=:]\s*([\w./-]+)", value.replace('"', "")))
    written = [
        f"{flag} " + (f"normal:{mean},{deviation}" if deviation else mean)
        for flag, name in (("--input-tokens", "prompt_tokens"), ("--output-tokens", "output_tokens"))
        if (mean := fields.get(name))
        for deviation in (fields.get(f"{name}_stdev"),)
    ]
    return f"write {' '.join(written)}" if written else "lengths are --input-tokens N --output-tokens N, " + _FILES


_CLASSES = "describe classes of requests in a workload file (docs/reference/workloads.md): --workload FILE"
_SHARED = (
    "describe shared prefixes in a workload file (prefixes or system_prompt, docs/reference/workloads.md): "
    "--workload FILE"
)
_SESSIONS = (
    "describe sessions in a workload file (turns and think_time_s, docs/reference/workloads.md): --workload FILE"
)
_BY_FILE = "leave what is longer out of the file of --prompts FILE"
_ONE_FILE = "the run directory is --out DIR, and its summary.json has all results"
_ONE_RUN = "a run has one load; give one --rate or --concurrency to each run"
# Options that need another form here: what to write; with the value given, where the text depends on it.
HINTS: dict[str, str | Callable[[str], str]] = {
    "--data": _synthetic,
    "--data-args": _FILES,
    "--host": "give the server with --url http://HOST:PORT",
    "--port": "give the server with --url http://HOST:PORT",
    "--served-model-name": "the name that the server lists is --model NAME",
    "--public-dataset": _FILES,
    "--fixed-schedule": "replay the moments of a trace with --arrival replay --trace FILE",
    "--random-range-ratio": "write the range of lengths, as in --input-tokens uniform:410-614",
    **dict.fromkeys(
        ("--custom-output-len", "--sharegpt-output-len"),
        "state max_tokens beside each prompt of --prompts FILE (docs/how-to/own-prompts.md)",
    ),
    "--seq-dist": _CLASSES,
    "--sequence-distribution": _CLASSES,
    **dict.fromkeys(
        ("--random-prefix-len", "--prefix-prompt-length", "--prompt-prefix-length", "--num-prefix-prompts",
         "--prefix-prompt-pool-size", "--shared-system-prompt-length", "--prefix-repetition-prefix-len"), _SHARED
    ),
    **dict.fromkeys(
        ("--num-sessions", "--num-conversations", "--conversation-num", "--session-turns-mean",
         "--conversation-turn-mean", "--session-turn-delay-mean", "--conversation-turn-delay-mean"), _SESSIONS
    ),
    "--goodput": 'write objectives with a percentile and a unit: --slo "ttft_p99<500ms,tpot_p99<50ms"',
    "--logprobs": "write --extra-body '{\"NAME\": VALUE}', a JSON object that is merged into every request",
    "--backend-kwargs": "headers are --header 'Name: value', the key is SIDELIGHT_API_KEY, --insecure trusts any "
    "certificate",
    "--backend-args": "headers are --header 'Name: value', the key is SIDELIGHT_API_KEY, --insecure trusts any "
    "certificate",
    "--constraint": "write --requests N, --duration 30s or --slo OBJECTIVES",
    "--max-error-rate": "judge the run by --slo OBJECTIVES",
    "--failed-request-threshold": "judge the run by --slo OBJECTIVES",
    "--no-server-metrics": "server metrics are read where they are found; there is no need to leave them out, but "
    "--metrics URL can name a page",
    "--gpu-telemetry": "name a DCGM exporter's page with --metrics URL",
    "--otel-url": "send the spans of requests to a collector with --otlp-export URL",
    "--workers-max": "write --workers N",
    "--max-workers": "write --workers N",
    "--num-users": "write --concurrency N",
    "--user-centric-rate": "write --rate R, with --workload FILE for sessions",
    "--connection-reuse-strategy": "write --no-reuse for a new connection to each request",
    "--rampup": "write --ramp linear --ramp-to R --ramp-duration 30s",
    "--request-rate-ramp-duration": "write --ramp linear --ramp-to R --ramp-duration 30s",
    "--warmup-duration": "write a number of requests: --warmup N",
    "--cooldown": "requests in flight at the end are waited for: --drain-timeout 120s",
    "--sharegpt-max-prompt-len": _BY_FILE,
    "--sharegpt-max-total-len": _BY_FILE,
    "--plot-timeline": "report.html has the chart: --formats html",
    "--metadata": "write --tag NAME=VALUE",
    "--tokenizer-revision": "name the file itself: --tokenizer PATH",
    "--prefill-concurrency": "all that is in flight is limited together: --concurrency N",
    "--concurrency-ramp-duration": "write --ramp linear --ramp-to R --ramp-duration 30s",
    "--request-cancellation-rate": "no request is cancelled; one that is too long ends by --request-timeout 60s",
    "--num-profile-runs": _ONE_RUN,
    "--search-space": _ONE_RUN,
    "--result-filename": _ONE_FILE,
    "--output-path": _ONE_FILE,
    "--outputs": "write --formats json,csv,jsonl,parquet,text",
    "--output": "write --out DIR for the run directory, and --formats json,csv,jsonl,parquet,text",
    "--profile-export-file": _ONE_FILE,
    "--profile-export-prefix": _ONE_FILE,
    "--scenario": "write options to a file: --config FILE",
}  # fmt: skip
