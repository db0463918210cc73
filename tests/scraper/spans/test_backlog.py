"""Exports that wait for the next collector: in the logs of spans, for who comes next, and not for ever."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from odd_exports import odd_export, over_grpc
from served import collector
from waiting import BOUND_S

from rundir.access import Access
from rundir.files import open_regular
from rundir.frames import Rotation
from scraper.spans.backlog import CURSOR, OTHERS, claimed, final_counts, left_beside
from scraper.spans.forward import Forwarder
from scraper.spans.log import Counts, ExportRecord, SpanLog, StateRecord, compressed, last_counts, packed, read_log
from scraper.spans.receiver import Receiver
from scraper.spans.spec import MOST_STEPS, ForwardKeep, ReceiverSpec

S = 10**9
NOW_NS = 1_700_000_000 * S
HOUR = ForwardKeep(seconds=3600, most_bytes=10**6)


def bodies(*numbers: int) -> list[bytes]:
    """Exports of which the first byte of an id is a number."""
    return [odd_export(NOW_NS, trace_id=bytes([number]) * 16) for number in numbers]


def raw(path: Path, name: str) -> Path:
    (path / name / "raw").mkdir(parents=True, exist_ok=True)
    return path / name / "raw"


def names(folder: Path, pattern: str = "*") -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def states_of(log: Path) -> list[StateRecord]:
    return [record for record in read_log(log) if isinstance(record, StateRecord)]


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scraper.spans.forward.FLUSH_S", 0.01)


@contextmanager
def nowhere() -> Iterator[tuple[str, socket.socket]]:
    """Give the URL of a collector that is away, and the socket at which it may come back."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}", reserved


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not fact():  # noqa: ASYNC110  the forwarder's own tasks
            await asyncio.sleep(0.01)


@dataclass(slots=True)
class Passing:
    """A forwarder, and the log that it reads."""

    forwarder: Forwarder
    log: SpanLog
    said: list[str] = field(default_factory=list)

    def log_exports(self, exports: list[bytes], *, at_ns: int = NOW_NS) -> None:
        for body in exports:
            record = packed(at_ns, "grpc", body)
            self.log.append(record)
            self.forwarder.logged(len(record.packed))

    def counts(self) -> tuple[int, int, int]:
        """Exports that were sent, were dropped, and wait."""
        return self.forwarder.sent.total(), self.forwarder.dropped.total(), self.forwarder.queue.exports

    async def until(self, *counts: int) -> None:
        await until(lambda: self.counts() == counts)


@asynccontextmanager
async def passing(
    log: Path,
    url: str,
    keep: ForwardKeep | None = HOUR,
    *,
    now_ns: int = NOW_NS,
    rotation: Rotation | None = None,
    queue_bytes: int = 1000,
) -> AsyncIterator[Passing]:
    with closing(SpanLog(log, rotation)) as spans:
        said: list[str] = []
        forwarder = Forwarder(
            url, Access(), log=log, say=said.append, queue_bytes=queue_bytes, keep=keep, now_ns=lambda: now_ns
        )
        async with forwarder:
            state = StateRecord(at_ns=now_ns, state="started", counts=Counts(), queue=forwarder.queue)
            spans.append(state)
            forwarder.begin()
            yield Passing(forwarder, spans, said)
            spans.append(msgspec.structs.replace(state, state="ended", queue=forwarder.queue))


async def left(log: Path, url: str, exports: list[bytes], *, waiting: int = 0, **how: object) -> None:
    """Let a receiver take exports for a collector that is away, beside so many that wait, and end."""
    async with passing(log, url, **how) as before:  # type: ignore[arg-type]
        before.log_exports(exports)
        await before.until(0, 0, waiting + len(exports))


async def test_the_next_receiver_sends_what_the_last_one_could_not(tmp_path: Path):
    """In the order in which it came, from log to log, and nothing that had left."""
    folder = raw(tmp_path, "watch")
    async with collector((200, {})) as (url, exports):
        rotation = Rotation(most_bytes=1, most_s=3600)
        async with passing(folder / "spans-000003.log", url, rotation=rotation) as first:
            for number in (1, 2):
                first.log_exports(bodies(number))
                await first.until(number, 0, 0)
        assert [] == left_beside(tmp_path / "other/raw/spans-0.log")
    with nowhere() as (url, reserved):
        await left(folder / "spans-000007.log", url, bodies(3, 4, 5), rotation=rotation)
        await left(folder / "spans-000015.log", url, bodies(6), waiting=3)
        async with (
            collector((200, {}), sock=reserved) as (_, exports),
            passing(folder / "spans-000020.log", url) as last,
        ):
            last.log_exports(bodies(7))
            await last.until(5, 0, 0)
    assert bodies(3, 4, 5, 6, 7) == [body for _, body in exports]


async def test_a_restart_in_the_middle_sends_the_rest(tmp_path: Path):
    """What the collector has taken is not sent again, though the log holds it."""
    folder = raw(tmp_path, "watch")
    answers = [(200, {}), (200, {}), (503, {})]
    async with collector(*answers) as (url, exports):
        async with passing(folder / "spans-0.log", url) as before:
            before.log_exports(bodies(1, 2, 3, 4))
            await before.until(2, 0, 2)
        exports.clear()  # the collector answers as at the beginning
        async with passing(folder / "spans-1.log", url) as after:
            await after.until(2, 0, 0)
    assert bodies(3, 4) == [body for _, body in exports]


async def test_the_next_watch_sends_what_a_dead_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its directory lies beside ours, it forwarded to the same collector, and it does not live."""
    monkeypatch.setattr("scraper.spans.forward.TAKE_OVER_EVERY_S", 0.02)
    with nowhere() as (url, reserved):
        urls = {"dead": url, "alive": url, "receives": url, "other": "http://127.0.0.1:9"}
        for number, (name, collector_url) in enumerate(urls.items(), 1):
            await left(raw(tmp_path / f"of-{name}", name) / "spans-0.log", collector_url, bodies(number))
            (tmp_path / f"of-{name}" / name).rename(tmp_path / name)
        with claimed(tmp_path / "alive/raw"), ExitStack() as receiving:
            receiving.enter_context(claimed(tmp_path / "receives/raw"))
            async with (
                collector((200, {}), sock=reserved) as (_, exports),
                passing(raw(tmp_path, "ours") / "spans-0.log", url) as ours,
            ):
                await ours.until(1, 0, 0)
                receiving.close()
                await ours.until(2, 0, 0)
    assert bodies(1, 3) == [body for _, body in exports]
    there = [folder.parent.name for folder in left_beside(tmp_path / "nothing/raw/spans-0.log")]
    assert ["alive", "other"] == there


async def test_logs_and_metrics_wait_for_who_comes_next_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The next receiver, and the next watch: in files that go as they leave, and that no log of spans holds up."""
    monkeypatch.setattr("scraper.spans.forward.TAKE_OVER_EVERY_S", 0.02)
    folder, others = raw(tmp_path, "dead"), [b"\x0a\x02\x12\x00" * number for number in (1, 2, 3, 4)]
    with nowhere() as (url, reserved):
        for number, name in enumerate(("logs", "metrics")):
            async with passing(folder / f"spans-{number}.log", url, queue_bytes=100) as killed:
                killed.log_exports(bodies(number))
                killed.forwarder.offer(compressed(others[number]), name)
                await killed.until(0, 0, 2 * number + 2)
                left_files = {path: path.read_bytes() for path in folder.iterdir()}
            for path, content in left_files.items():  # as a kill leaves them
                path.write_bytes(content)
        async with passing(folder / "spans-2.log", url, queue_bytes=100) as last:
            last.forwarder.offer(compressed(others[2]), "logs")
            await last.until(0, 0, 5)
        assert {f"others-{number:06d}.queue" for number in (1, 2, 3)} == names(folder, OTHERS)
        async with (
            collector((200, {}), sock=reserved, path="/v1/{signal}") as (_, exports),
            passing(raw(tmp_path, "ours") / "spans-0.log", url) as ours,
        ):
            ours.forwarder.offer(compressed(others[3]), "metrics")
            await ours.until(6, 0, 0)
            assert {"logs": 2, "metrics": 2, "traces": 2} == ours.forwarder.sent
            await until(lambda: not names(folder, OTHERS))
    taken = [body for _, body in exports]
    assert others[:3] == [body for body in taken if body in others[:3]]
    assert sorted([*others, *bodies(0, 1)]) == sorted(taken)
    assert {"spans-0.log", CURSOR} == names(folder.parents[1] / "ours/raw")
    assert {*(f"spans-{number}.log" for number in range(3)), CURSOR} == names(folder)
    assert [] == left_beside(tmp_path / "other/raw/spans-0.log")


async def test_a_signal_that_the_collector_wants_later_holds_no_other_up(tmp_path: Path):
    """Spans go out while logs wait."""

    async def take(request: web.Request) -> web.Response:
        return web.Response(status=503 if request.path == "/v1/logs" else 200)

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    folder = raw(tmp_path, "watch")
    async with TestServer(app) as server, passing(folder / "spans-0.log", f"http://127.0.0.1:{server.port}") as partly:
        partly.forwarder.offer(compressed(b"logs"), "logs")
        partly.log_exports(bodies(1))
        await partly.until(1, 0, 1)
        assert {"traces": 1} == partly.forwarder.sent


async def test_what_waits_too_long_is_dropped_and_counted(tmp_path: Path):
    """By when it came; a clock that was set meanwhile makes nothing older."""
    folder = raw(tmp_path, "watch")
    with nowhere() as (url, _):
        async with passing(folder / "spans-0.log", url) as early:
            early.log_exports(bodies(1), at_ns=NOW_NS - 3590 * S)
            early.log_exports(bodies(2), at_ns=NOW_NS - 10 * S)
            await early.until(0, 0, 2)
        async with passing(folder / "spans-1.log", url, now_ns=NOW_NS + 20 * S) as late:
            late.log_exports(bodies(3), at_ns=NOW_NS + 20 * S)
            await late.until(0, 1, 2)
        assert f"exports that wait too long, or are too many, for {url} are dropped" in late.said
        set_ahead = ForwardKeep(seconds=3600, most_bytes=10**6, clock_steps=((NOW_NS + 30 * S, 7200 * S),))
        async with passing(folder / "spans-2.log", url, set_ahead, now_ns=NOW_NS + 7230 * S) as last:
            await last.until(0, 0, 2)
        async with passing(folder / "spans-3.log", url, now_ns=NOW_NS + 7230 * S) as last:
            await last.until(0, 2, 0)


MOMENTS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(-5000, 5000).filter(bool)), max_size=12
)  # pauses, and by how much the clock is then set, s


@given(steps=MOMENTS, came_s=st.integers(0, 20_000), late_s=st.integers(0, 5000))
def test_a_clock_that_is_set_makes_no_export_older(steps: list[tuple[int, int]], came_s: int, late_s: int) -> None:
    """Nor younger, where its stamp can be of one time only. Steps that matter no more are forgotten."""
    keep, everything, clock_s, now_s, came_ns = HOUR, HOUR, NOW_NS // S, 0, -1
    begun_s = -math.inf
    times: list[tuple[float, float]] = []  # from when to when the clock went by itself, with what it then skipped
    for pause_s, moved_s in [*steps, (late_s, 0)]:
        if came_ns < 0 and now_s + pause_s >= came_s:
            came_ns = (clock_s + max(0, came_s - now_s)) * S  # stamped by the clock as it was then
        now_s, clock_s = now_s + pause_s, clock_s + pause_s
        times.append((begun_s, max(clock_s, clock_s + moved_s) if moved_s else math.inf))
        if moved_s:
            keep = keep.after_step(clock_s * S, moved_s * S)
            known = *everything.clock_steps, (clock_s * S, moved_s * S)
            everything = msgspec.structs.replace(everything, clock_steps=known)
        clock_s = begun_s = clock_s + moved_s
        assert everything.is_over(clock_s * S, clock_s * S) == keep.is_over(clock_s * S, clock_s * S) is False
        if came_ns >= 0:
            is_over, is_true = keep.is_over(came_ns, clock_s * S), now_s - came_s > HOUR.seconds
            assert everything.is_over(came_ns, clock_s * S) == is_over
            assert is_true or not is_over
            if moved_s == 0 and sum(begin <= came_ns / S <= end for begin, end in times) == 1:
                assert is_over == is_true


@pytest.mark.parametrize(
    ("steps", "came_s", "now_s", "is_over"),
    [
        (((0, -3600), (-3540, 7200)), 0, 3660, False),
        (((0, -3600), (-3540, 3600)), -3700, 60, True),
        (((0, -3600), (-3540, 3600), (120, -3600), (-3420, 3600)), -7000, 180, True),
    ],
    ids=["back, and farther ahead a minute later", "back and ahead", "again and again"],
)
def test_a_clock_that_is_set_back_and_soon_ahead_again(
    steps: tuple[tuple[int, int], ...], came_s: int, now_s: int, is_over: bool
):
    """What came two minutes ago is not too old, and what came before all steps does not become younger by each."""
    keep = ForwardKeep(
        seconds=3600, most_bytes=1, clock_steps=tuple((NOW_NS + at_s * S, by_s * S) for at_s, by_s in steps)
    )
    assert is_over == keep.is_over(NOW_NS + came_s * S, NOW_NS + now_s * S)


def test_of_a_clock_that_is_set_again_and_again_few_steps_are_known():
    """What waits is dropped a little late for it, and never early."""
    keep, came_ns = HOUR, list[int]()
    for second in range(6000):
        came_ns.append(NOW_NS + 3 * second * S)
        keep = keep.after_step(came_ns[-1], 2 * S)
    assert MOST_STEPS >= len(keep.clock_steps)
    over = [keep.is_over(stamp_ns, came_ns[-1] + 2 * S) for stamp_ns in came_ns]
    assert all(over[: 6000 - 3600 - 300])
    assert not any(over[6000 - 3600 :])
    back = keep.after_step(came_ns[-1] + 2 * S, -60 * S)
    assert (came_ns[-1] + 2 * S, -60 * S) == back.clock_steps[-1]
    later_ns = came_ns[-1] + 4000 * S
    assert ((later_ns, 2 * S),) == back.after_step(later_ns, 2 * S).clock_steps


@pytest.mark.parametrize("first_s", [3600, -3600])
def test_a_clock_that_two_set_in_turn_keeps_nothing_for_ever(first_s: int):
    """To and fro by an hour, each minute: what waits is dropped an hour late at most, and never early."""
    keep, clock_s, came = HOUR, NOW_NS // S, list[tuple[int, int]]()
    for minute in range(300):
        came.append((60 * minute, clock_s + 30))
        clock_s += 60
        keep = keep.after_step(clock_s * S, first_s * S * (-1) ** minute)
        clock_s = keep.clock_steps[-1][0] // S + keep.clock_steps[-1][1] // S
        ages_s = [60 * minute + 30 - came_s for came_s, stamp_s in came if not keep.is_over(stamp_s * S, clock_s * S)]
        assert min(minute + 1, 60) <= len(ages_s)
        assert max(ages_s) <= 2 * 3600
    assert MOST_STEPS >= len(keep.clock_steps)


async def test_of_what_is_too_much_the_oldest_is_dropped(tmp_path: Path):
    """So that a collector that stays away does not fill the disk; logs that were deleted are counted, too."""
    folder = raw(tmp_path, "watch")
    size = len(packed(NOW_NS, "grpc", bodies(1)[0]).packed)
    with nowhere() as (url, reserved):
        keep = ForwardKeep(seconds=3600, most_bytes=3 * size + size // 2)
        rotation = Rotation(most_bytes=1, most_s=3600)
        async with passing(folder / "spans-000000.log", url, keep, rotation=rotation) as away:
            away.log_exports(bodies(1, 2, 3, 4, 5))
            await away.until(0, 2, 3)
            queue = away.forwarder.queue
            assert (3 * size, 2) == (queue.size_bytes, queue.first_log)
            (folder / "spans-000004.log").unlink()
            async with collector((200, {}), sock=reserved) as (_, exports):
                await away.until(2, 3, 0)
    assert bodies(3, 5) == [body for _, body in exports]


async def test_a_log_that_cannot_be_opened_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where all descriptors are in use: nothing of it is lost."""
    folder, refusals = raw(tmp_path, "watch"), iter([1, 2])

    def refuse(path: Path) -> FileIO:
        if next(refusals, None):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return open_regular(path)

    async with collector((200, {})) as (url, exports), passing(folder / "spans-0.log", url) as short:
        monkeypatch.setattr("rundir.frames.open_regular", refuse)
        short.log_exports(bodies(1, 2))
        await short.until(2, 0, 0)
    assert bodies(1, 2) == [body for _, body in exports]
    assert [f"spans cannot be forwarded to {url}: {folder}/spans-0.log: Too many open files"] == short.said[:1]


async def test_what_a_run_could_not_send_is_dropped_at_its_end(tmp_path: Path):
    """No other follows it."""
    folder = raw(tmp_path, "run")
    with nowhere() as (url, _):
        async with passing(folder / "spans-0.log", url, None) as run:
            run.log_exports(bodies(1, 2))
            await run.until(0, 0, 2)
    assert (0, 2, 0) == run.counts()
    assert [] == left_beside(tmp_path / "other/raw/spans-0.log")


@pytest.mark.parametrize("is_closed", [False, True], ids=["in its midst", "before its last record"])
async def test_counts_are_right_though_a_receiver_was_killed(tmp_path: Path, is_closed: bool):
    """It had not recorded what it had sent last: its report and the next one do, and the sum of both is the truth."""
    folder = raw(tmp_path, "watch")
    async with collector((200, {})) as (url, exports):
        spec = ReceiverSpec(grpc="127.0.0.1:0", http="", forward=url, forward_keep=HOUR)
        log = SpanLog(folder / "spans-0.log")
        async with Receiver(spec, log=log, say=print) as killed:
            for body in bodies(1, 2, 3):
                await over_grpc(killed.grpc_port, body)
            await until(lambda: killed.counts().forwarded == 3)
            cursor, logged = (folder / CURSOR).read_bytes(), (folder / "spans-0.log").read_bytes()
        log.close()
        if not is_closed:
            (folder / CURSOR).write_bytes(cursor)
        (folder / "spans-0.log").write_bytes(logged)
        counts, deaths = final_counts(folder, states_of(folder / "spans-0.log"))
        assert counts is not None
        assert (3, 0, 1) == (counts.forwarded, counts.forward_dropped, deaths)
        log = SpanLog(folder / "spans-1.log")
        async with Receiver(spec, log=log, say=print) as following:
            await over_grpc(following.grpc_port, bodies(4)[0])
            await until(lambda: following.counts().forwarded == 4)
        log.close()
    assert 4 == len(exports)
    logs = folder / "spans-0.log", folder / "spans-1.log"
    assert 4 == sum(isinstance(record, ExportRecord) for log in logs for record in read_log(log))
    states = [state for log in logs for state in states_of(log)]
    (counts, _), (whole, _) = last_counts(states), final_counts(folder, states)
    assert (4, 0) == (counts.forwarded, counts.forward_dropped)
    assert whole == counts
    assert 4 == states[-1].queue.forwarded
