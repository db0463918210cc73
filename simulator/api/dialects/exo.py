"""exo's /bench/chat/completions: never streamed, never stopped before max_tokens, with generation_stats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect
from sidelight.simulator.api.requests import Generation, read_generation
from sidelight.simulator.api.responses import ReplyInfo, refused, whole_reply
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.settings import SimulatorSettings


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read_generation(body, chat=True, settings=settings)
    return replace(wanted, stream=False, ignore_eos=True)


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    reply = whole_reply(info, outputs, chat=True)
    stats = {
        "prompt_tps": info.prompt_tokens / record.prefill_s,
        "generation_tps": (len(outputs) - 1) / record.decode_s if record.decode_s > 0 else 0.0,
        "prompt_tokens": info.prompt_tokens,
        "generation_tokens": len(outputs),
        # There is no memory here to measure: exo's field, with a gibibyte in it.
        "peak_memory_usage": {"inBytes": 1 << 30},
        "prefix_cache_hit": "partial" if record.cached_tokens else "none",
    }
    return reply[:-1] + b',"generation_stats":' + msgspec.json.encode(stats) + b"}"


DIALECT = Dialect(prefix="exo", read=_read, whole=_whole, refused=refused)
