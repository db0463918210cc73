"""Exports that a watch takes over from a dead one, and is killed."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from faults.cases import NotReachedError
from faults.take_over import FOLLOWERS, LIMIT_BYTES, TAKEN, WRITES, collector, killed, leave
from waiting import BOUND_S

from rundir.access import masked
from scraper.spans.backlog import final_counts
from scraper.spans.log import SpanLog, StateRecord, read_log
from scraper.spans.receiver import Receiver
from scraper.spans.spec import ForwardKeep, ReceiverSpec

SEND_S = 0.5  # in which exports that must not leave would


async def test_each_export_is_counted_once_whenever_a_taker_is_killed(tmp_path: Path):
    """Before each write of a cursor: none is lost, and the one on its way alone is sent again."""
    two = asyncio.Semaphore(2)  # more at once are no faster

    async def attempt(nth: int) -> str:
        async with two:
            return await killed(tmp_path / str(nth), FOLLOWERS[nth // 2 % 2], nth)

    wrong = await asyncio.gather(*(attempt(nth) for nth in range(1, WRITES + 1)))
    assert {} == {nth: text for nth, text in enumerate(wrong, 1) if text}


async def test_a_take_over_has_no_more_writes(tmp_path: Path):
    """But for that at the taker's end: the test above has them all."""
    with pytest.raises(NotReachedError):
        await killed(tmp_path, "receiver", WRITES + 2)


async def test_nothing_is_taken_over_by_a_receiver_that_is_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What one forwarded that was killed before it listened was counted by none."""
    begins, raw, killed_then = asyncio.Event(), tmp_path / "taker" / "raw", tmp_path / "killed"
    begins.set()
    raw.mkdir(parents=True)
    listen, taken_then = Receiver._listen_http, 0

    async def listen_late(receiver: Receiver) -> None:
        nonlocal taken_then
        await asyncio.sleep(SEND_S)
        shutil.copytree(raw, killed_then)
        taken_then = sent.count(TAKEN)
        await listen(receiver)

    monkeypatch.setattr(Receiver, "_listen_http", listen_late)
    async with collector(begins) as (url, sent):
        leave(tmp_path / "dead" / "raw", masked(url))
        spec = ReceiverSpec(
            http="127.0.0.1:0", forward=url, forward_keep=ForwardKeep(seconds=60, most_bytes=LIMIT_BYTES)
        )
        with closing(SpanLog(raw / "spans-000000.log")) as log:
            async with Receiver(spec, log=log, say=print), asyncio.timeout(BOUND_S):
                while TAKEN not in sent:  # noqa: ASYNC110  nothing tells of it
                    await asyncio.sleep(0.001)
    states = [state for state in read_log(killed_then / log.path.name) if isinstance(state, StateRecord)]
    counts, _ = final_counts(killed_then, states)
    assert (counts.forwarded if counts else 0) == taken_then
