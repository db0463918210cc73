"""The load that options of other benchmarks stand for: what they do where none is typed, and GuideLLM's profiles."""

from __future__ import annotations

from collections.abc import Iterable

# Options that each of them alone has; those that several have, or that are ours, tell nothing.
_VLLM = frozenset(
    ("--num-prompts", "--dataset-path", "--random-input-len", "--random-output-len", "--num-warmups", "--result-dir")
)  # fmt: skip
_AIPERF = frozenset(
    ("--request-count", "--num-requests", "--isl", "--osl", "--endpoint-type",
     "--synthetic-input-tokens-mean", "--prompt-input-tokens-mean",
     "--prompt-output-tokens-mean", "--output-tokens-mean", "--benchmark-duration", "--benchmark-grace-period",
     "--warmup-request-count", "--num-warmup-requests", "--artifact-dir", "--output-artifact-dir", "--input-file",
     "--request-timeout-seconds")
)  # fmt: skip
_GUIDELLM = frozenset(("--target", "--max-seconds", "--max-requests", "--processor"))
_DISTINCT = "--num-dataset-entries"
# What says itself how much load there is; a configuration file may.
_LOADS = frozenset(
    ("--rate", "--arrival", "--burstiness", "--trace", "--replay-requests", "--sessions", "--config")
)  # fmt: skip
_LENGTHS = frozenset(("--requests", "--duration"))
STREAMS = ("synchronous", "concurrent", "throughput")
LEAST_OF_AIPERF, REQUESTS_OF_VLLM = 10, 1000


def meant(name: str, typed: Iterable[str]) -> str:
    """Return the meaning of an option's name. AIPerf's --num-prompts, a number of distinct prompts, is not that of
    vLLM's.
    """
    others = frozenset(typed) - {"--num-prompts"}
    return _DISTINCT if name == "--num-prompts" and others & _AIPERF and not others & _VLLM else name


def sweep_note(typed: Iterable[str], arguments: Iterable[str]) -> str:
    """Return a note on GuideLLM's default sweep if no load is typed, else "". It concerns command lines with GuideLLM's
    options.
    """
    if not _GUIDELLM & frozenset(typed) or frozenset(arguments) & (_LOADS | {"--concurrency"}):
        return ""
    return "GuideLLM sweeps without --profile: that is `sidelight test throughput URL`; this is one run at 1 request/s"


def defaults_of(typed: Iterable[str], arguments: list[str]) -> tuple[list[str], str]:
    """Return another benchmark's default load as arguments, and its name; none where a load is typed."""
    theirs = next((name for name in typed if name in _VLLM | _AIPERF), None)
    ours = frozenset(arguments)
    if theirs is None or ours & _LOADS:
        return [], ""
    width = arguments[arguments.index("--concurrency") + 1 :][:1] if "--concurrency" in ours else []
    if theirs in _VLLM:
        at_once = [] if width or ("--duration" in ours and "--requests" not in ours) else ["--rate", "inf"]
        count = [] if ours & _LENGTHS else ["--requests", str(REQUESTS_OF_VLLM)]
        return at_once + count, "vllm bench serve"
    in_flight = max((int(level) for level in ",".join(width).split(",") if level.isdecimal()), default=1)
    count = ["--requests", str(max(LEAST_OF_AIPERF, 2 * in_flight))]
    one_by_one = [] if "--concurrency" in ours else ["--concurrency", "1"]
    return one_by_one + ([] if ours & {*_LENGTHS, "--prompts"} else count), "AIPerf"


def with_streams(profile: str, arguments: list[str]) -> list[str]:
    """Return the arguments of a GuideLLM profile as ours. Its --rate is a number of streams.

    Raises ValueError, which names what to write, where that number is missing.
    """
    rest, streams = list(arguments), None
    if "--rate" in rest:
        at = rest.index("--rate")
        streams = next(iter(rest[at + 1 : at + 2]), None)
        del rest[at : at + 2]
    if "--concurrency" in rest:
        return rest
    if profile == "synchronous":
        return [*rest, "--concurrency", "1"]
    if streams is not None:
        return [*rest, "--concurrency", streams]
    if profile == "throughput" and "--requests" in rest:
        return [*rest, "--rate", "inf"]
    if profile == "throughput":
        raise ValueError("add --requests N to send N at once, or find the limit: sidelight test throughput URL")
    raise ValueError("add the number of streams, --concurrency N")
