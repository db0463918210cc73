"""Exports that a watch takes over from a dead one, and is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults.cases import NotReachedError
from faults.take_over import FOLLOWERS, WRITES, killed


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
