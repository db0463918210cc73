"""`python -m sidelight.simulator`: the simulated engine as a process.

It prints one JSON line, {"event":"ready","url":...}, once it listens (with --grpc-port also grpc_url), and runs until
SIGINT or SIGTERM (exit 0) or, with --exit-on-eof, until its standard input ends. Exit 2: unusable options, an
address that cannot be had too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sidelight.rundir.access import connection_problem
from sidelight.rundir.files import open_private
from sidelight.simulator.router import routing
from sidelight.simulator.server import serve
from sidelight.simulator.settings import (
    ENGINES,
    KV_ROLES,
    POLICIES,
    PROFILES,
    EngineSettings,
    GatewaySettings,
    RouterSettings,
    SettingsError,
    SimulatorSettings,
    speed_profile,
)


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m sidelight.simulator") -> int:
    """Run with these command-line arguments and return the exit code. If None, with those of the process."""
    options = _parser(prog).parse_args(arguments)
    try:
        settings = _settings(options) if options.router is None else _router(options)
        for option, path in (("--truth", options.truth), ("--truth-steps", options.truth_steps)):
            if path is not None:
                _create(option, path)
    except SettingsError as error:
        return _fail(f"{error}", 2)
    try:
        asyncio.run(_run(settings, exit_on_eof=options.exit_on_eof))
    except OSError as error:
        return _fail(
            f"cannot listen on {settings.host}:{settings.port}: {connection_problem(error)}; choose another port, or 0",
            2,
        )
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    limits = EngineSettings()
    server = SimulatorSettings()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="A simulated continuous-batching engine with an OpenAI-compatible server and a /metrics page.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--engine",
        default=server.engine,
        help=f"engine whose metrics page and streams are imitated: {', '.join(ENGINES)}",
    )
    add("--host", default=server.host, help="address to listen on")
    add("--port", type=int, default=server.port, help="port to listen on; 0 picks a free one")
    add(
        "--grpc-port",
        type=int,
        default=None,
        help="port for KServe v2 over gRPC; 0 picks a free one; without it, no gRPC",
    )
    add("--per-request-metrics", action="store_true", help="report the times of a request in its usage, as vLLM can")
    add(
        "--per-request-spec-decode-metrics",
        choices=("none", "summary"),
        default="none",
        help="report the drafts of a request in its usage, as vLLM can",
    )
    add(
        "--reasoning-tokens",
        type=int,
        default=server.reasoning_tokens,
        help="tokens of reasoning at the beginning of each reply to a chat or to /v1/messages",
    )
    add(
        "--perf-metrics",
        type=int,
        default=server.perf_metrics_max_requests,
        help="most request records that /perf_metrics of trtllm holds until it is read; 0: none",
    )
    add(
        "--otlp-endpoint",
        default="",
        help="send the spans of requests to the collector at http://HOST:PORT, over gRPC",
    )
    add("--model", default=server.model, help="model name")
    add("--seed", type=int, default=limits.seed, help="seed of the texts, their lengths and the jitter of steps")
    add("--truth", type=Path, default=None, help="append the true times of every request to this file (JSON lines)")
    add("--speed-profile", default="demo", help=f"duration of a step: {', '.join(PROFILES)}")
    add("--max-num-seqs", type=int, default=limits.max_num_seqs, help="most sequences that run at the same time")
    add("--max-num-batched-tokens", type=int, default=limits.max_num_batched_tokens, help="token budget of a step")
    add("--max-model-len", type=int, default=limits.max_model_len, help="most prompt and output tokens of a request")
    add("--kv-blocks", type=int, default=limits.kv_blocks, help=f"KV cache, in blocks of {limits.block_size} tokens")
    add("--kv-host-blocks", type=int, default=limits.kv_host_blocks, help="host memory behind the KV cache, in blocks")
    _add_behaviour(parser)
    _add_pair(parser)
    add("--no-tokenize", action="store_true", help="do not serve /tokenize and /detokenize")
    add("--exit-on-eof", action="store_true", help="stop when standard input ends")
    return parser


def _add_behaviour(parser: argparse.ArgumentParser) -> None:
    """Add options for the engine's scheduling, failures and slowness, and for the gateway before it."""
    limits, gateway = EngineSettings(), GatewaySettings()
    add = parser.add_argument
    add("--prefix-caching", choices=("on", "off"), default="on", help="whether prompts are looked up in the cache")
    add("--policy", default=limits.policy, help=f"order of those that wait: {', '.join(POLICIES)}")
    add("--slow", type=float, default=limits.slow, metavar="F", help="every step takes F times as long")
    add("--drift", default="0%/h", metavar="PERCENT/h", help="steps take longer by so much every hour, as in 5%%/h")
    add("--speculation", default="0@0", metavar="TOKENS@RATE", help="draft tokens a step, and the rate of acceptance")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="LoRA adapters, which requests name as models")
    add("--max-loras", type=int, default=limits.max_loras, metavar="N", help="most adapters that run at once")
    add("--lora-load", default="0ms", metavar="TIME", help="time to load an adapter that is not held")
    add("--oom-at", type=int, default=None, metavar="N", help="out of memory (HTTP 500) with N sequences in a step")
    add("--oom-exits", action="store_true", help="the process ends there, without a word to any client")
    add("--fail-above", type=int, default=None, metavar="N", help="HTTP 503 for requests beyond N in flight")
    add("--guard-input", default="0", metavar="MS[:US]", help="an input guardrail: MS a request, and US a prompt token")
    add("--guard-output", default="", metavar="N:MS", help="an output guardrail: holds N tokens back to look at for MS")
    add("--guard-refuse", type=float, default=gateway.refuse_ratio, metavar="RATIO", help="share of prompts refused")
    add("--truth-steps", type=Path, default=None, metavar="FILE", help="append each step of the engine to this file")


def _add_pair(parser: argparse.ArgumentParser) -> None:
    """Add options for two engines that share requests, and the router before them."""
    add = parser.add_argument
    add("--role", default="", help=f"part in requests that two engines share: {', '.join(KV_ROLES)}")
    add(
        "--kv-transfer",
        default="5ms",
        metavar="LATENCY[+BANDWIDTH]",
        help="time to load a prompt's KV cache with --role decode (SGLang's --role prefill sends it), as in 5ms+10GB/s",
    )
    add(
        "--kv-load",
        choices=("async", "sync"),
        default="async",
        help="whether loads are waited for in the queue or a step",
    )
    add(
        "--router",
        nargs=2,
        metavar=("PREFILL_URL", "DECODE_URL"),
        help="no engine, but the router before two engines with these roles",
    )
    add("--hold", default="0ms", metavar="TIME", help="time that the router holds a request between the two engines")


def _router(options: argparse.Namespace) -> RouterSettings:
    """Return the router that the options state. Raises SettingsError."""
    prefill_url, decode_url = (url.rstrip("/") for url in options.router)
    return RouterSettings(
        prefill_url=prefill_url,
        decode_url=decode_url,
        at_once=options.engine == "sglang",
        hold_s=_seconds("--hold", options.hold),
        host=options.host,
        port=options.port,
        truth=options.truth,
    )


def _seconds(option: str, text: str) -> float:
    """Return an option's time in seconds. Raises SettingsError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise SettingsError(f"{option} {text}: write a time with its unit, as in 20ms or 1.5s")
    return float(match[1]) / {"ms": 1e3, "s": 1.0}[match[2]]


def _bytes_per_s(text: str) -> float:
    """Return the bandwidth of a KV transfer, infinite where none is stated. Raises SettingsError."""
    _, is_stated, rate = text.partition("+")
    bytes_per_s = 1e9 * _number("--kv-transfer", rate.removesuffix("GB/s"), "5ms+10GB/s") if is_stated else math.inf
    if bytes_per_s <= 0:
        raise SettingsError(f"--kv-transfer {text}: the bandwidth must be above 0, as in 5ms+10GB/s")
    return bytes_per_s


def _gateway(options: argparse.Namespace) -> GatewaySettings:
    """Return the gateway that the options state. Raises SettingsError."""
    request_ms, _, token_us = options.guard_input.partition(":")
    tokens, _, hold_ms = (options.guard_output or "0:0").partition(":")
    return GatewaySettings(
        input_s=_number("--guard-input", request_ms, "MS or MS:US, as in 30 or 30:50") / 1e3,
        input_token_s=_number("--guard-input", token_us or "0", "MS or MS:US, as in 30 or 30:50") / 1e6,
        hold_tokens=round(_number("--guard-output", tokens, "N:MS, as in 50:40")),
        hold_s=_number("--guard-output", hold_ms, "N:MS, as in 50:40") / 1e3,
        refuse_ratio=options.guard_refuse,
        fail_above=options.fail_above,
    )


def _drift(text: str) -> float:
    """Return an option's PERCENT/h as a ratio. Raises SettingsError."""
    return _number("--drift", text.removesuffix("/h").removesuffix("%"), "PERCENT/h, as in 5%/h") / 100


def _speculation(text: str) -> tuple[int, float]:
    """Return the tokens of a draft, and the rate at which they are accepted. Raises SettingsError."""
    tokens, _, rate = text.partition("@")
    form = "TOKENS@RATE, as in 3@0.7"
    return round(_number("--speculation", tokens, form)), _number("--speculation", rate, form)


def _number(option: str, text: str, form: str) -> float:
    """Return the number of an option. Raises SettingsError, which says how it is written."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SettingsError(f"{option}: {text!r} is not a number; write {form}")
    return number


def _settings(options: argparse.Namespace) -> SimulatorSettings:
    """Return the settings that the options state. Raises SettingsError."""
    return SimulatorSettings(
        engine=options.engine,
        host=options.host,
        port=options.port,
        model=options.model,
        lora_modules=tuple(options.lora_modules),
        truth=options.truth,
        truth_steps=options.truth_steps,
        tokenize=not options.no_tokenize,
        grpc_port=options.grpc_port,
        per_request_metrics=options.per_request_metrics,
        per_request_spec_decode_metrics=options.per_request_spec_decode_metrics == "summary",
        reasoning_tokens=options.reasoning_tokens,
        perf_metrics_max_requests=options.perf_metrics,
        otlp_endpoint=options.otlp_endpoint,
        engine_settings=EngineSettings(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_blocks=options.kv_blocks,
            kv_host_blocks=options.kv_host_blocks,
            max_model_len=options.max_model_len,
            seed=options.seed,
            speed=speed_profile(options.speed_profile),
            prefix_caching=options.prefix_caching == "on",
            policy=options.policy,
            slow=options.slow,
            drift_per_h=_drift(options.drift),
            oom_at=options.oom_at,
            kv_role=options.role,
            kv_latency_s=_seconds("--kv-transfer", options.kv_transfer.partition("+")[0]),
            kv_bytes_per_s=_bytes_per_s(options.kv_transfer),
            kv_async=options.kv_load == "async",
            max_loras=options.max_loras,
            lora_load_s=_seconds("--lora-load", options.lora_load),
            draft_tokens=_speculation(options.speculation)[0],
            accept_ratio=_speculation(options.speculation)[1],
        ),
        gateway=_gateway(options),
        oom_exits=options.oom_exits,
    )


def _create(option: str, path: Path) -> None:
    """Create the file of an option. Raises SettingsError."""
    try:
        os.close(open_private(path, os.O_APPEND))
    except OSError as error:
        raise SettingsError(f"{option} {path}: cannot be written: {error.strerror}") from None


async def _route(settings: RouterSettings) -> None:
    async with routing(settings) as url:
        _announce(url, "")
        await asyncio.Event().wait()


async def _run(settings: SimulatorSettings | RouterSettings, *, exit_on_eof: bool) -> None:
    """Serve until a signal or, if asked for, the end of standard input."""
    loop = asyncio.get_running_loop()
    running = _route(settings) if isinstance(settings, RouterSettings) else serve(settings, _announce)
    serving = asyncio.create_task(running)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    if exit_on_eof:
        threading.Thread(target=_cancel_at_eof, args=(loop, serving), daemon=True).start()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _announce(url: str, grpc_url: str) -> None:
    # What is alive now lives to the end: the collector need not look at it between steps.
    gc.freeze()
    ready = {"event": "ready", "url": url} | ({"grpc_url": grpc_url} if grpc_url else {})
    print(msgspec.json.encode(ready).decode(), flush=True)


def _cancel_at_eof(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # The loop may have ended first.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(serving.cancel)


def _fail(message: str, code: int) -> int:
    print(f"simulator: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
