"""Names of options in AIPerf, GuideLLM and `vllm bench serve`. An option with the same values is a second name here;
for each of the others there is a hint at its replacement.
"""

from __future__ import annotations

from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.sidecar.formats import FORMATS

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
    "--endpoint-type": "--endpoint",
    "--request-rate-mode": "--arrival", "--arrival-pattern": "--arrival",
    "--rate-type": "--arrival", "--profile": "--arrival",
    "--server-metrics": "--metrics", "--server-metrics-formats": "--formats",
    "--artifact-dir": "--out", "--output-artifact-dir": "--out", "--result-dir": "--out", "--output-dir": "--out",
}  # fmt: skip

_FILES = "a file of prompts is --prompts FILE, a trace --trace FILE, a known data set --workload NAME --dataset FILE"
_STREAMS = (
    "a number of streams is --concurrency N, and a rate --rate R; a sweep is a study: sidelight test throughput URL "
    "--scale short"
)
_ARRIVALS = ("--request-rate-mode", "--arrival-pattern", "--rate-type", "--profile")
_BODY_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"
)  # fmt: skip
_ALWAYS_WRITTEN = "leave it out: all results are always written to the run directory"
_ALL_SHOWN = "leave it out: every metric is reported with its percentiles"
_NO_DISPLAY = "write --quiet for the result only, or leave it out"
_NO_CODE = "leave it out: no code of a model is run"
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
_RAMP = "write a ramp over the whole load as --rate START..END"
_FORMATS = f"--formats {','.join(FORMATS)}"
_ONE_RUN = "a run has one load; give one --rate or --concurrency to each run"
# What to write instead of an option, or of an option with a value.
HINTS = {
    **{f"{name} {theirs}": "write --arrival uniform" for name in _ARRIVALS for theirs in ("constant", "async")},
    "--rate-type sweep": _STREAMS,
    "--profile sweep": _STREAMS,
    **{f"--endpoint {protocol.path}": f"write --endpoint {name}" for name, protocol in PROTOCOLS.items()},
    "--backend": "give the server with --url URL, the model with --model and the API with --endpoint chat or "
    "completions",
    "--dataset-name": f"leave it out for random prompts; {_FILES}",
    "--custom-dataset-type": "leave it out: --prompts knows a file by its look, and a trace is --trace FILE",
    **{
        f"--{name.replace('_', '-')}": f"write --extra-body '{{\"{name}\": VALUE}}', which is merged into every request"
        for name in _BODY_FIELDS
    },
    "--extra-inputs": "write --extra-body '{\"NAME\": VALUE}', which is merged into every request",
    **dict.fromkeys(
        ("--isl-stddev", "--synthetic-input-tokens-stddev", "--prompt-input-tokens-stddev"),
        "write it with its mean: --input-tokens normal:MEAN,DEVIATION",
    ),
    **dict.fromkeys(
        ("--osl-stddev", "--output-tokens-stddev", "--prompt-output-tokens-stddev"),
        "write it with its mean: --output-tokens normal:MEAN,DEVIATION",
    ),
    "--data": "lengths are --input-tokens N --output-tokens N, each also normal:MEAN,DEVIATION; " + _FILES,
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
    **dict.fromkeys(
        ("--rampup", "--request-rate-ramp-duration", "--concurrency-ramp-duration", "--ramp-up-strategy",
         "--ramp-up-start-rps", "--ramp-up-end-rps"), _RAMP
    ),
    "--warmup-duration": "write a number of requests: --warmup N",
    "--cooldown": "requests in flight at the end are waited for: --drain-timeout 120s",
    "--sharegpt-max-prompt-len": _BY_FILE,
    "--sharegpt-max-total-len": _BY_FILE,
    "--plot-timeline": "report.html has the chart: --formats html",
    "--metadata": "write --tag NAME=VALUE",
    "--tokenizer-revision": "name the file itself: --tokenizer PATH",
    "--prefill-concurrency": "all that is in flight is limited together: --concurrency N",
    "--request-cancellation-rate": "no request is cancelled; one that is too long ends by --request-timeout 60s",
    "--num-profile-runs": _ONE_RUN,
    "--search-space": _ONE_RUN,
    "--result-filename": _ONE_FILE,
    "--output-path": _ONE_FILE,
    "--outputs": f"write {_FORMATS}",
    "--output": f"write --out DIR for the run directory, and {_FORMATS}",
    "--profile-export-file": _ONE_FILE,
    "--profile-export-prefix": _ONE_FILE,
    "--scenario": "write options to a file: --config FILE",
    "--streaming": "leave it out: replies are always streamed",
    "--use-server-token-count": "leave it out: tokens of replies are the server's usage",
    "--use-legacy-max-tokens": "leave it out: max_tokens is what is sent",
    **dict.fromkeys(
        ("--save-result", "--save-detailed", "--append-result", "--export-http-trace", "--show-trace-timing",
         "--export-level", "--profile-export-level"), _ALWAYS_WRITTEN
    ),
    "--detect-saturation": "leave it out: the report says by itself that a system was overloaded",
    "--no-gpu-telemetry": "leave it out: power is read from this machine only, and only where it can be",
    **dict.fromkeys(
        ("--disable-tqdm", "--disable-progress", "--disable-console", "--disable-console-interactive", "--ui",
         "--ui-type"), _NO_DISPLAY
    ),
    "--trust-remote-code": _NO_CODE,
    "--tokenizer-trust-remote-code": _NO_CODE,
    "--disable-shuffle": "leave it out: prompts of a file are sent in its order",
    "--no-oversample": "leave it out: a file's prompts are sent once each, unless more are asked for",
    "--skip-tokenizer-init": "leave it out: a tokenizer is needed for the lengths of prompts only",
    "--percentile-metrics": _ALL_SHOWN,
    "--metric-percentiles": _ALL_SHOWN,
    "--tokenizer-mode": "leave it out: a tokenizer.json says itself what it is",
    "--backend-type": "choose the API with --endpoint",
    "--num-dataset-entries": "leave it out: prompts do not repeat",
    "--ready-check-timeout-sec": "leave it out: the server is asked before each run, and must answer",
    "--log-level": "leave it out, or write --verbose to see where an error came from",
    "--label": "a run is named by its directory, --out DIR",
}  # fmt: skip
