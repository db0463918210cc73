"""`python -m simulator`: the simulated engine as a process.

It prints one JSON line, {"event":"ready","url":...}, once it listens (with --grpc-port also grpc_url), and runs until
SIGINT or SIGTERM (exit 0) or, with --exit-on-eof, until its standard input ends. Exit 2: unusable options; exit 3: the
address cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rundir.access import connection_problem
from simulator.server import serve
from simulator.settings import ENGINES, PROFILES, EngineSettings, SettingsError, SimulatorSettings, speed_profile


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m simulator") -> int:
    """Run with these command-line arguments (those of the process if None) and return the exit code."""
    options = _parser(prog).parse_args(arguments)
    try:
        settings = _settings(options)
        if settings.truth is not None:
            settings.truth.touch()
    except SettingsError as error:
        return _fail(f"{error}", 2)
    except OSError as error:
        return _fail(f"truth: cannot write {options.truth}: {error.strerror}", 2)
    try:
        asyncio.run(_run(settings, exit_on_eof=options.exit_on_eof))
    except OSError as error:
        return _fail(
            f"cannot listen on {settings.host}:{settings.port}: {connection_problem(error)}; choose another port, or 0",
            3,
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
    add("--no-tokenize", action="store_true", help="do not serve /tokenize and /detokenize")
    add("--exit-on-eof", action="store_true", help="stop when standard input ends")
    return parser


def _settings(options: argparse.Namespace) -> SimulatorSettings:
    """Return the settings that the options state. Raises SettingsError."""
    return SimulatorSettings(
        engine=options.engine,
        host=options.host,
        port=options.port,
        model=options.model,
        truth=options.truth,
        tokenize=not options.no_tokenize,
        grpc_port=options.grpc_port,
        per_request_metrics=options.per_request_metrics,
        perf_metrics_max_requests=options.perf_metrics,
        otlp_endpoint=options.otlp_endpoint,
        engine_settings=EngineSettings(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_blocks=options.kv_blocks,
            max_model_len=options.max_model_len,
            seed=options.seed,
            speed=speed_profile(options.speed_profile),
        ),
    )


async def _run(settings: SimulatorSettings, *, exit_on_eof: bool) -> None:
    """Serve until a signal or, if asked for, the end of standard input."""
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(serve(settings, _announce))
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
