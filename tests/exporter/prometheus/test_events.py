"""Events for browsers: each gets all that is kept, in order, and a slow one costs the others nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sidelight.exporter.prometheus import events
from sidelight.exporter.prometheus.events import EventStream


async def taken(browser: AsyncIterator[bytes], count: int) -> list[bytes]:
    return [await anext(browser) for _ in range(count)]


async def test_a_browser_that_comes_later_gets_what_is_kept_and_the_last_state():
    """The states before are of no use to it."""
    stream = EventStream()
    for number in range(3):
        stream.publish(b"event %d" % number, b"state %d" % number)
    assert [b"state 2", *(b"id: %d\nevent %d" % (n, n) for n in range(3))] == await taken(stream.events(), 4)


@pytest.mark.parametrize(("last_id", "first"), [("1", 2), ("", 0), ("-1", 0), ("x", 0), ("9" * 400, 0)])
async def test_a_browser_that_comes_back_gets_what_came_meanwhile(last_id: str, first: int):
    """By the id of the last event that it had; one that no event has had stands for none."""
    stream = EventStream()
    for number in range(4):
        stream.publish(b"event %d" % number, b"")
    assert [b"id: %d\nevent %d" % (first, first)] == await taken(stream.events(last_id), 1)


async def test_a_browser_that_reads_nothing_keeps_no_other_waiting_and_misses_what_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
):
    """What is kept stays within its bounds."""
    monkeypatch.setattr(events, "KEPT_BYTES", 30)
    stream = EventStream()
    slow, quick = stream.events(), stream.events()
    stream.publish(b"x" * 10, b"")
    await taken(slow, 1)
    await taken(quick, 1)
    for number in range(1, 9):
        stream.publish(b"%010d" % number, b"")
        assert [b"id: %d\n%010d" % (number, number)] == await taken(quick, 1)
    assert [b"id: %d\n%010d" % (n, n) for n in (6, 7, 8)] == await taken(slow, 3)
    assert stream.kept_s < events.KEPT_S


async def test_the_end_lets_every_browser_go():
    """With what is left, and the report behind it; it is made once somebody is there."""
    stream = EventStream()
    browsers = [stream.events() for _ in range(2)]
    stream.publish(b"last", b"")
    for browser in browsers:
        await taken(browser, 1)
    reports = iter((b"report for one", b"report for the other"))
    stream.end(lambda: next(reports))
    waiting = asyncio.ensure_future(stream.until_left(600))
    left = [[event async for event in browser] for browser in browsers]
    assert [[b"report for one"], [b"report for the other"]] == left
    await waiting
    assert not stream.is_watched


async def test_the_wait_for_browsers_has_an_end():
    """After a time, and with Ctrl-C, without an error: what was measured is written by then."""
    stream = EventStream()
    browser = stream.events()
    stream.publish(b"event", b"")
    await taken(browser, 1)
    await stream.until_left(0.01)
    waiting = asyncio.ensure_future(stream.until_left(600))
    await asyncio.sleep(0)
    waiting.cancel()
    await waiting
    assert stream.is_watched


async def test_it_is_time_to_publish_as_soon_as_a_browser_comes():
    """And then each second, instead of each quarter of a minute."""
    stream = EventStream()
    assert stream.is_due
    stream.publish(b"event", b"")
    assert not stream.is_due
    await taken(stream.events(), 1)
    assert stream.is_due
