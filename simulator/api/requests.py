"""Parsing of requests to the OpenAI-compatible endpoints, with refusals as in vLLM.

Sampling parameters are accepted and ignored: nothing is sampled here. `n` above 1 (but of SGLang's streams), more than
one prompt in a request and `echo` are refused rather than answered wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from sidelight.simulator.engine.tokenizer import UnknownTokenError, decode, encode, encode_chat
from sidelight.simulator.settings import SimulatorSettings

COMPLETIONS_DEFAULT_MAX_TOKENS = 16
_MOST_SAMPLES = 128

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Model = TypeVar("_Model")


class RefusedError(Exception):
    """A request is refused; carries what the error reply says."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


class StreamOptions(msgspec.Struct):
    """Options of a stream about usage: in one more chunk at the end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct):
    """A piece of a message; only text counts."""

    type: str = "text"
    text: str = ""


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class KvTransferParams(msgspec.Struct):
    """The part of another engine in a request, as routers state it to vLLM: to decode it, or to have its prompt."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class RoomAddress(NamedTuple):
    """The address of a bootstrap room, as routers state it to SGLang."""

    host: str
    port: int
    number: int


class ChatRequest(msgspec.Struct):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class CompletionRequest(msgspec.Struct):
    """The body of POST /v1/completions; the prompt is a text, token ids, or a list of one text."""

    prompt: str | list[int | str]
    model: str | None = None
    max_tokens: _Positive | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    echo: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class TokenizeRequest(msgspec.Struct):
    """The body of POST /tokenize: a prompt, or messages under the chat template."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that can be run: its tokens and how its reply is wanted."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    samples: int = 1
    priority: int = 0
    cache_salt: str = ""
    remote_decode: bool = False
    remote_prefill: bool = False
    room: RoomAddress | None = None
    adapter: str = ""


def read(body: bytes, shape: type[_Model]) -> _Model:
    """Return a body as a record of that shape. Raises RefusedError (400)."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, f"{error}") from None


def read_generation(body: bytes, *, chat: bool, settings: SimulatorSettings) -> Generation:
    """Return the generation that a chat or completions request asks for.

    Raises RefusedError: 404 for another model, 400 for a malformed body, for what is not simulated, and for a
    prompt or a prompt with its output that exceeds the model's length.
    """
    model, max_model_len = settings.only_model, settings.engine_settings.max_model_len
    request: ChatRequest | CompletionRequest
    limit: int | None
    if chat:
        request = read(body, ChatRequest)
        token_ids = chat_token_ids(request.messages)
        limit = request.max_completion_tokens or request.max_tokens
    else:
        request = read(body, CompletionRequest)
        token_ids = _prompt_token_ids(request)
        limit = request.max_tokens or COMPLETIONS_DEFAULT_MAX_TOKENS
    adapter = request.model if request.model in settings.lora_modules else ""
    check_model(None if adapter else request.model, model)
    samples, role = 1 if request.n is None else request.n, settings.engine_settings.kv_role
    if samples != 1 and not (
        settings.engine == "sglang" and not role and request.stream and 1 < samples <= _MOST_SAMPLES
    ):
        raise RefusedError(400, f"n must be 1 here, got {request.n}. (parameter=n, value={request.n})", param="n")
    _check_scheduling(request, settings)
    transfer = request.kv_transfer_params or KvTransferParams()
    room = _room(request) if role and settings.engine == "sglang" else None
    is_sent_on = role == "prefill" and room is not None  # its one token is sent with the KV cache
    options = request.stream_options or StreamOptions()
    return Generation(
        prompt_token_ids=tuple(token_ids),
        max_tokens=1 if is_sent_on else fitting_max_tokens(len(token_ids), limit, max_model_len),
        ignore_eos=bool(request.ignore_eos),
        stream=bool(request.stream) and not is_sent_on,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        samples=samples,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        remote_decode=role == "prefill" and transfer.do_remote_decode,
        remote_prefill=role == "decode" and (transfer.do_remote_prefill or room is not None),
        room=room,
        adapter=adapter or "",
    )


def _room(request: ChatRequest | CompletionRequest) -> RoomAddress | None:
    if request.bootstrap_room is None:
        return None
    return RoomAddress(request.bootstrap_host or "", request.bootstrap_port or 0, request.bootstrap_room)


def _check_scheduling(request: ChatRequest | CompletionRequest, settings: SimulatorSettings) -> None:
    """Raise RefusedError (400) for an empty salt, and for a priority where there are none."""
    if request.cache_salt is not None and not request.cache_salt:
        raise RefusedError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    if request.priority and settings.engine_settings.policy != "priority":
        message = f"Got priority {request.priority} but Priority scheduling is not enabled."
        raise RefusedError(400, message, param="priority")


def check_model(asked: str | None, served: str | None) -> None:
    """Raise RefusedError (404) for a model that is not served; a request may name none, and None serves any."""
    if asked is not None and served is not None and asked != served:
        message = f"The model `{asked}` does not exist. Valid aliases: {served}."
        raise RefusedError(404, message, kind="NotFoundError", param="model")


def chat_token_ids(messages: list[ChatMessage], *, open_reply: bool = True) -> list[int]:
    """Return the tokens of messages under the chat template. Raises RefusedError (400) when there are none."""
    if not messages:
        raise RefusedError(400, "messages must not be empty", param="messages")
    return encode_chat([(message.role, _text(message.content)) for message in messages], open_reply=open_reply)


def _text(content: str | list[ContentPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content if part.type == "text")
    return content or ""


def _prompt_token_ids(request: CompletionRequest) -> list[int]:
    if request.echo:
        raise RefusedError(400, "echo is not simulated", param="echo")
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        token_ids = encode(prompt)
    else:
        token_ids = [item for item in prompt if isinstance(item, int)]
        if len(token_ids) < len(prompt):
            raise RefusedError(400, "prompt must be one text or one list of token ids", param="prompt")
        try:
            decode(token_ids)
        except UnknownTokenError as error:
            raise RefusedError(400, f"{error}", param="prompt") from None
    if not token_ids:
        raise RefusedError(400, "prompt must not be empty", param="prompt")
    return token_ids


def fitting_max_tokens(prompt_tokens: int, limit: int | None, max_model_len: int) -> int:
    """Return the limit of a reply's tokens: the requested one, else all the room left.

    Raises RefusedError (400) when the model is too short for it.
    """
    if prompt_tokens >= max_model_len:
        raise RefusedError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if limit is None:
        return max_model_len - prompt_tokens
    if prompt_tokens + limit > max_model_len:
        raise RefusedError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} output "
            f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + limit} "
            f"tokens. Please reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    return limit
