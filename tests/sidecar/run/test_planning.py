"""The plans of a run, and what becomes of it where they cannot be made."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from codes import raises

from sidelight.loadgen.plan.fitting import Planned
from sidelight.loadgen.plan.tokenizers.fitting import TokenizerError
from sidelight.loadgen.plan.tokenizers.server import ServerTokenizer
from sidelight.recorded.errors import TargetIncompatible
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.preparation.planning import write_plan


async def requests_counted_at(url: str) -> AsyncGenerator[Planned, None]:
    async with ServerTokenizer(aiohttp.ClientSession(), url, "m") as tokenizer:
        await tokenizer.encode("a prompt")
    for never in ():
        yield never


async def test_an_engine_that_died_is_not_called_a_bad_tokenizer(tmp_path: Path):
    """Nothing takes connections where its /tokenize was."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        requests = requests_counted_at(f"http://127.0.0.1:{bound.getsockname()[1]}")
        with raises("engine.gone"):
            await write_plan(requests, tmp_path / "plan-warmup.log", progress=Progress("quiet"))


@pytest.mark.parametrize(("exact", "cure"), [(False, "--tokenizer cl100k_base"), (True, "leave out --exact-tokens")])
async def test_the_cure_of_a_failed_tokenizer_is_one_that_helps(tmp_path: Path, *, exact: bool, cure: str):
    """The reference tokenizer counts no chat template, so it does not help where lengths are exact after that."""

    async def failed() -> AsyncGenerator[Planned, None]:
        raise TokenizerError("tokenizer.chat-template", "no such role")
        yield

    with pytest.raises(TargetIncompatible, match=f"{cure}$"):
        await write_plan(failed(), tmp_path / "plan-measure.log", progress=Progress("quiet"), exact=exact)
