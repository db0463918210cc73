"""The settings of a simulated engine and of the server around it.

Every value is checked where the record is made, so that nothing behind it has to ask again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

ENGINES = ("vllm", "sglang", "trtllm")
POLICIES = ("fcfs", "shortest-first", "priority")
KV_ROLES = ("prefill", "decode")
#: A token's keys and values, as of Llama 3 8B: 32 layers, 8 heads of 128 numbers of 2 bytes.
KV_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
#: From host memory, over PCIe 4.0 with 16 lanes: 5.2 us a token.
KV_HOST_BYTES_PER_S = 25e9


class SettingsError(ValueError):
    """A setting has no usable value; the message is one line: the option, its value, and what would be valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedProfile:
    """Durations of engine steps.

    step_s + prefill_token_s x prompt tokens computed + sequence_s x sequences in the step
    + kv_token_s x tokens those sequences hold in the KV cache, times a log-normal factor of mean 1
    whose logarithm has the standard deviation `jitter_ratio`.
    """

    step_s: float
    prefill_token_s: float
    sequence_s: float
    kv_token_s: float
    jitter_ratio: float


#: `demo`: about 10-15 ms a step and 0.15 ms a prompt token, so that queueing and prefill show beside a load
#: generator on two shared cores. `fast`: a tenth of that, for tests of what surrounds the engine.
PROFILES = {
    "demo": SpeedProfile(step_s=8e-3, prefill_token_s=150e-6, sequence_s=200e-6, kv_token_s=0.2e-6, jitter_ratio=0.05),
    "fast": SpeedProfile(step_s=1e-3, prefill_token_s=10e-6, sequence_s=20e-6, kv_token_s=0.02e-6, jitter_ratio=0.05),
}


def speed_profile(name: str) -> SpeedProfile:
    """Return the profile of that name.

    Raises SettingsError, which lists the names and the nearest one.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise SettingsError(_unknown("--speed-profile", name, PROFILES)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The limits of one engine, as in vLLM's options of the same names.

    `max_num_batched_tokens` is the token budget of a step, `kv_blocks` the size of the KV cache in blocks of
    `block_size` tokens; `eos_chance` is the probability that a token ends a reply which does not ignore the end.

    `policy` is the order in which waiting requests are scheduled: as they came, the shortest prompt first, or, as vLLM
    has it, the lowest priority first. All steps take `slow` times as long, and `drift_per_h` more an hour. With
    `oom_at` sequences in a step the engine runs out of memory, and loses what it has.

    `kv_role` is prefill or decode where two engines share requests, "" of an engine alone. The decode engine loads the
    KV cache of a prompt in `kv_latency_s` and KV_TOKEN_BYTES a token at `kv_bytes_per_s`: with `kv_async` each load by
    itself, else one after the other within the step that then computes.

    Each decode step verifies `draft_tokens` of speculative decoding, 0 without it: each is accepted with probability
    `accept_ratio` where those before it were. It takes as long as a step without them.

    What leaves the KV cache stays in `kv_host_blocks` of host memory, 0 without. A prompt's prefix there is loaded at
    KV_HOST_BYTES_PER_S within the step that first computes for it.

    At most `max_loras` LoRA adapters run at once, and as many are held: another is loaded in `lora_load_s`, within the
    step that first computes for it.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    kv_blocks: int = 2048
    block_size: int = 16
    max_model_len: int = 8192
    eos_chance: float = 0.01
    seed: int = 0
    speed: SpeedProfile = PROFILES["demo"]
    prefix_caching: bool = True
    policy: str = "fcfs"
    slow: float = 1.0
    drift_per_h: float = 0.0
    oom_at: int | None = None
    kv_role: str = ""
    kv_latency_s: float = 0.005
    kv_bytes_per_s: float = math.inf
    kv_async: bool = True
    draft_tokens: int = 0
    accept_ratio: float = 0.0
    kv_host_blocks: int = 0
    max_loras: int = 1
    lora_load_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise SettingsError for limits under which some request could never run."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size", "max_loras"):
            if (limit := getattr(self, name)) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} {limit}: must be 1 or more")
        if self.kv_host_blocks < 0:
            raise SettingsError(f"--kv-host-blocks {self.kv_host_blocks}: must be 0 or more")
        if self.kv_host_blocks and self.kv_role:
            raise SettingsError(f"--kv-host-blocks: not with --role {self.kv_role}")
        if self.max_model_len < 2:
            raise SettingsError(f"--max-model-len {self.max_model_len}: must be 2 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: must be at least "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        if self.kv_blocks * self.block_size < self.max_model_len:
            needed = -(-self.max_model_len // self.block_size)
            raise SettingsError(
                f"--kv-blocks {self.kv_blocks}: one request of --max-model-len {self.max_model_len} needs {needed}; "
                "raise --kv-blocks or lower --max-model-len"
            )
        if self.seed < 0:
            raise SettingsError(f"--seed {self.seed}: must be 0 or more")
        if self.policy not in POLICIES:
            raise SettingsError(_unknown("--policy", self.policy, POLICIES))
        if not 0.001 <= self.slow <= 1000:
            raise SettingsError(f"--slow {self.slow:g}: must be from 0.001 to 1000")
        if not -0.9 <= self.drift_per_h <= 100:
            raise SettingsError(f"--drift {100 * self.drift_per_h:g}%/h: must be from -90%/h to 10000%/h")
        if self.oom_at is not None and self.oom_at < 1:
            raise SettingsError(f"--oom-at {self.oom_at}: must be 1 or more")
        if self.draft_tokens < 0 or not 0 <= self.accept_ratio <= 1:
            raise SettingsError(
                f"--speculation {self.draft_tokens}@{self.accept_ratio:g}: must be tokens from 0 and a rate from 0 to 1"
            )
        if self.kv_role and self.kv_role not in KV_ROLES:
            raise SettingsError(_unknown("--role", self.kv_role, KV_ROLES))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of the gateway between clients and the engine: guardrails, and a limit.

    A request waits `input_s` and `input_token_s` a prompt token before the engine sees it; a share `refuse_ratio` of
    prompts is then refused, always the same ones. `hold_tokens` of a stream are held back until they were looked at,
    which takes `hold_s`; 0: none are. Beyond `fail_above` requests in flight all are turned away.
    """

    input_s: float = 0.0
    input_token_s: float = 0.0
    hold_tokens: int = 0
    hold_s: float = 0.0
    refuse_ratio: float = 0.0
    fail_above: int | None = None

    def __post_init__(self) -> None:
        """Raise SettingsError for a value out of bounds."""
        times = {"--guard-input": (self.input_s, self.input_token_s), "--guard-output": (self.hold_s,)}
        for name, seconds in ((name, seconds) for name, given in times.items() for seconds in given):
            if not 0 <= seconds <= 3600:
                raise SettingsError(f"{name}: must take from 0 s to an hour, not {seconds:g} s")
        if self.hold_tokens < 0:
            raise SettingsError(f"--guard-output: must hold 0 tokens or more, not {self.hold_tokens}")
        if not 0 <= self.refuse_ratio <= 1:
            raise SettingsError(f"--guard-refuse {self.refuse_ratio:g}: must be from 0 to 1")
        if self.fail_above is not None and self.fail_above < 1:
            raise SettingsError(f"--fail-above {self.fail_above}: must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """A simulated engine behind an HTTP server.

    `port` 0 takes any free port. `lora_modules` are names of adapters, which requests ask for as models. `truth` is the
    file that gets one JSON line a request, `truth_steps` the one that gets a line a step of the engine, or None.
    `tokenize` false leaves /tokenize and /detokenize out, as some engines do. `grpc_port` is None without gRPC, 0 for
    any free port. `per_request_metrics` adds `metrics` and cached tokens to the usage of chat and completions, as vLLM
    does with --enable-per-request-metrics and --enable-prompt-tokens-details, `per_request_spec_decode_metrics` each
    request's drafts. The first `reasoning_tokens` of a chat's reply, and of one of Anthropic's Messages API, are
    reasoning. `perf_metrics_max_requests` is how many
    records TensorRT-LLM's /perf_metrics keeps, 0 for none, as by default. `otlp_endpoint` is the URL of the collector
    that gets the spans of requests, by gRPC without TLS; empty: none are sent. `gateway` stands before the engine. With
    `oom_exits` the process ends where the engine runs out of memory.
    """

    engine: str = "vllm"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "sim-llama"
    lora_modules: tuple[str, ...] = ()
    truth: Path | None = None
    truth_steps: Path | None = None
    tokenize: bool = True
    grpc_port: int | None = None
    per_request_metrics: bool = False
    per_request_spec_decode_metrics: bool = False
    reasoning_tokens: int = 0
    perf_metrics_max_requests: int = 0
    otlp_endpoint: str = ""
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    oom_exits: bool = False

    def __post_init__(self) -> None:
        """Raise SettingsError for invalid settings.

        Invalid are, for example, an engine that is not simulated, an impossible port or an empty name.
        """
        if self.engine not in ENGINES:
            raise SettingsError(_unknown("--engine", self.engine, ENGINES))
        for option, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise SettingsError(f"{option} {port}: a port is 1 to 65535, and 0 picks a free one")
        if self.perf_metrics_max_requests < 0:
            raise SettingsError(f"--perf-metrics {self.perf_metrics_max_requests}: must be 0 or more")
        if self.reasoning_tokens < 0:
            raise SettingsError(f"--reasoning-tokens {self.reasoning_tokens}: must be 0 or more")
        if self.oom_exits and self.engine_settings.oom_at is None:
            raise SettingsError("--oom-exits: needs --oom-at N, the sequences at which memory runs out")
        if self.engine_settings.kv_role and self.engine == "trtllm":
            role = self.engine_settings.kv_role
            raise SettingsError(f"--role {role}: not with --engine trtllm; vllm and sglang have roles")
        if self.engine_settings.kv_host_blocks and self.engine == "trtllm":
            raise SettingsError("--kv-host-blocks: not with --engine trtllm; vllm and sglang have it")
        if self.engine_settings.draft_tokens and self.engine != "vllm":
            raise SettingsError(f"--speculation: not with --engine {self.engine}; leave --engine out: vllm speculates")
        if self.lora_modules and self.engine != "vllm":
            raise SettingsError(
                f"--lora-modules: not with --engine {self.engine}; leave --engine out: vllm has adapters"
            )
        if not self.model:
            raise SettingsError("--model '': must not be empty")
        if self.otlp_endpoint and not self.otlp_target:
            raise SettingsError(f"--otlp-endpoint {self.otlp_endpoint}: must be http://HOST:PORT (gRPC)")

    @property
    def only_model(self) -> str | None:
        """Return the one model name that is answered; None where any is, as SGLang does."""
        return None if self.engine == "sglang" else self.model

    @property
    def otlp_target(self) -> str:
        """Return HOST:PORT of `otlp_endpoint`, empty where it has none."""
        try:
            parts = urlsplit(self.otlp_endpoint)
            usable = parts.scheme in ("http", "grpc") and parts.hostname and parts.port and not parts.path.strip("/")
        except ValueError:
            usable = False
        return parts.netloc if usable else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """A router between a prefill engine and a decode engine.

    It holds a request for `hold_s` between the two, or before both where they have it `at_once`, as SGLang's. `truth`
    is the file that gets its stamps of each, or None.
    """

    prefill_url: str
    decode_url: str
    at_once: bool = False
    hold_s: float = 0.0
    host: str = "127.0.0.1"
    port: int = 0
    truth: Path | None = None

    def __post_init__(self) -> None:
        """Raise SettingsError for a URL that has no host."""
        for url in (self.prefill_url, self.decode_url):
            if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
                raise SettingsError(f"--router {url}: must be the URL of an engine, as in http://127.0.0.1:8000")


def _unknown(option: str, name: str, valid: dict[str, SpeedProfile] | tuple[str, ...]) -> str:
    near = get_close_matches(name, valid, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{option} {name or repr(name)}: choose from {', '.join(valid)}{hint}"
