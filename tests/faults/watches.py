"""kill -9 of a watch's processes while spans come: what was acknowledged is in its report, and nothing twice.

A sender tries again until its export is taken, as exporters do. A receiver that dies is started again, and the watch
goes on; where its conductor dies, all of it ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
from faults import logs
from faults.cases import Case, Kind, Setting, Try
from processes import alive
from test_watch import RESTARTS, TRACE, Watch, request, watching  # that of the tests of `watch`

from sidelight.sidecar.run import open_run

MOST_REQUESTS = 40


async def _sent(watch: Watch, victim: int, count: int, rng: random.Random) -> int:
    """Send requests and kill a process on the way; return how many were acknowledged."""
    at = rng.randrange(count)
    for number in range(count):
        if number == at:
            os.kill(victim, signal.SIGKILL)
            if victim == watch.process.pid:
                await watch.process.wait()
                return number
        await watch.send(request(number + 1), over=rng.choice(("grpc", "http")))
    return count


async def killed(path: Path, who: str, rng: random.Random) -> str:
    """Kill a process of a watch, and say what is wrong with what came of it."""
    async with watching(path) as watch:
        children = list(processes.children(watch.process.pid))
        victim = watch.process.pid if who == "conductor" else watch.receiver()
        count = await _sent(watch, victim, rng.randrange(2, MOST_REQUESTS), rng)
        if who == "receiver":
            page = await watch.until(lambda page: page[TRACE] >= count and page[RESTARTS] >= 1)
            if page[TRACE] != count:
                return f"{count} requests were sent, and {page[TRACE]:g} counted"
            await watch.end()
    await asyncio.to_thread(processes.until, lambda: not any(map(alive, children)), "the processes of the watch")
    if "Traceback" in "".join(watch.said):
        return f"a defect: {watch.said[-1]}"
    report = logs.report(path)
    if report.wrong or report.code:
        return report.wrong or f"the report ends with {report.code}: {report.err}"
    recorded = len(open_run(path).requests)
    return "" if recorded == count else f"{count} requests were acknowledged, and {recorded} are in the report"


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        path = setting.place / "watch"
        shutil.rmtree(path, ignore_errors=True)
        return asyncio.run(killed(path, case.row, case.random()))

    yield attempt


WATCHES = Kind(
    name="watch",
    rows={"receiver": 1, "conductor": 1},
    opened=opened,
)
