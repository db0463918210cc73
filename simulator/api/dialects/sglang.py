"""SGLang's /generate: every event repeats the whole text so far."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect, Positive, generation, sse, text_of
from sidelight.simulator.api.requests import Generation, RefusedError, read
from sidelight.simulator.api.responses import DONE, ReplyInfo
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.engine.tokenizer import encode
from sidelight.simulator.settings import SimulatorSettings

_DEFAULT_MAX_NEW_TOKENS = 128


class _Sampling(msgspec.Struct):
    max_new_tokens: Positive = _DEFAULT_MAX_NEW_TOKENS
    ignore_eos: bool = False


class _SGLangRequest(msgspec.Struct):
    text: str
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    stream: bool = False


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read(body, _SGLangRequest)
    sampling = wanted.sampling_params
    return generation(
        encode(wanted.text), sampling.max_new_tokens, settings, ignore_eos=sampling.ignore_eos, stream=wanted.stream
    )


def _event(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    return sse(_chunk(info, outputs, record)) + (b"" if record is None else DONE)


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return msgspec.json.encode(_chunk(info, outputs, record))


def _chunk(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> dict[str, object]:
    meta: dict[str, object] = {
        "id": info.response_id,
        "finish_reason": None,
        "prompt_tokens": info.prompt_tokens,
        "completion_tokens": len(outputs),
    }
    if record is not None:
        reason = record.finish_reason
        meta |= {
            "finish_reason": {"type": reason, "length": len(outputs)} if reason == "length" else {"type": reason},
            "cached_tokens": record.cached_tokens,
            # All waits in the scheduler: after a retraction, those behind the first token too.
            "queue_time": record.queue_s + record.later_wait_ns / 1e9,
            "num_retractions": record.preemptions,
            "request_received_ts": record.arrival_ns / 1e9,
            "api_server_dispatch_finish_ts": record.dispatched_ns / 1e9,
            "forward_entry_time": record.scheduled_ns / 1e9,
            "prefill_finished_time": record.first_token_ns / 1e9,
            "request_finished_ts": record.finished_ns / 1e9,
            "first_token_latency": record.ttft_s,
            "e2e_latency": record.e2e_s,
        }
    return {"text": text_of(outputs), "meta_info": meta}


def _failed(message: str) -> bytes:
    return sse({"error": {"message": message}}) + DONE


def _refused(error: RefusedError) -> tuple[int, bytes]:
    return error.status, msgspec.json.encode({"error": {"message": error.message}})


DIALECT = Dialect(prefix="rid", read=_read, event=_event, whole=_whole, failed=_failed, refused=_refused)
