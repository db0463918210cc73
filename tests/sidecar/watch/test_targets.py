"""A watch follows the file of --metrics-from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sidelight.sidecar.options.watch import WatchOptions
from sidelight.sidecar.watch import targets
from sidelight.sidecar.watch.processes import Watch

BOUND_S = 30.0


async def until(holds: Callable[[], bool]) -> None:
    """Give way to the follower until something holds."""
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110  the follower signals nothing
            await asyncio.sleep(0)


async def test_the_file_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each change is recorded once with its counts, and so is each different mistake."""
    monkeypatch.setattr(targets, "DISCOVERY_S", 0)
    file = tmp_path / "targets.json"
    file.write_text('[{"targets": ["a:1"]}]')
    sent: list[list[str]] = []
    notes: list[str] = []
    warnings: list[str] = []

    async def send(command: Any) -> None:
        sent.append(command.targets)

    watch = SimpleNamespace(
        options=WatchOptions(metrics_from=file),
        pages=("http://a:1/metrics",),
        view=SimpleNamespace(scrape_only=lambda _: None),
        scraper=SimpleNamespace(child=SimpleNamespace(send=send)),
        progress=SimpleNamespace(stage=lambda _: None),
        record=lambda _, text: notes.append(text),
        warn_and_record=warnings.append,
    )
    following = asyncio.ensure_future(targets.follow_targets(cast("Watch", watch)))
    try:
        file.write_text('[{"targets": ["b:1", "c:1"]}]')
        await until(lambda: len(sent) > 0)
        file.write_text("[")
        await until(lambda: len(warnings) > 0)
        file.write_text('[{"targets": ["c:1", "b:1"]}]')  # in another order they are the same
        for _ in range(20):
            await asyncio.to_thread(str)
        file.write_text("[]")
        await until(lambda: watch.pages == ())
    finally:
        following.cancel()
    assert [["http://b:1/metrics", "http://c:1/metrics"], []] == sent
    assert 1 == len(warnings)
    assert 2 == len(notes)
    assert "2 pages" in notes[0]
