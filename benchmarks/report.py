"""What `sidelight report` costs on a run of many streamed replies, step by step.

    python benchmarks/report.py [--requests 10000] [--events 23] [--rate 20] [--scraped] [--repeat 3] [--keep DIR]
        [--command-alone]

The run directory is written here: its manifest and events are those of the recording under tests/golden/vllm_plain
without the warm-up, its requests are made up in the form of vLLM's chat replies, one HTTP chunk an event and a read a
chunk. Without --scraped no scrapes stand in it, so that what is measured is the requests' side; with it, the
recording's pages, one each second, whose counters go on as they went. An hour: `--requests 20000 --rate 5.56
--scraped`. CPU-seconds are the least of N measurements, user and system time together; the steps are measured in this
process, the whole command in one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.loadgen.protocols.reading.reply import unpack
from sidelight.loadgen.records import PlannedRequest, RequestPart, append_record, plan_end, read_log, read_plan
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.transports.packing import pack
from sidelight.rundir.frames import FrameLog, read_frames
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import ScrapeLog, ScrapeRow
from sidelight.scraper.series.log import read_log as read_scrapes
from sidelight.scraper.targets.scrape import Scrape
from sidelight.sidecar.report import derive

RECORDING = Path(__file__).parents[1] / "tests" / "golden" / "vllm_plain"
STEP_NS = 12_000_000
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 22 Nov 2026 04:51:19 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
WORDS = (" the", " closed", " of", "\\n", " caf\u00e9", ".", ' \\"so\\"', " number", " make", "ing", " a")


def chunks(name: str, events: int, rng: random.Random) -> Iterator[bytes]:
    """Give the HTTP chunks of one reply of vLLM: a role, `events` pieces of text, a finish reason, usage and [DONE]."""
    begin = f'{{"id":"{name}","object":"chat.completion.chunk","created":1795323079,"model":"tiny-llama","choices":['
    middle = '"logprobs":null,"finish_reason":'
    yield _chunk(f'{begin}{{"index":0,"delta":{{"role":"assistant","content":""}},{middle}null}}]}}')
    for word in rng.choices(WORDS, k=events - 1):
        yield _chunk(f'{begin}{{"index":0,"delta":{{"content":"{word}"}},{middle}null,"token_ids":null}}]}}')
    yield _chunk(f'{begin}{{"index":0,"delta":{{"content":" end"}},{middle}"length","stop_reason":null}}]}}')
    yield _chunk(f'{begin}],"usage":{{"prompt_tokens":17,"total_tokens":{17 + events},"completion_tokens":{events}}}}}')
    yield _chunk("[DONE]") + b"0\r\n\r\n"


def _chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def write_run(path: Path, requests: int, events: int, rate: float, *, scraped: bool) -> None:
    """Write a run directory of `requests` replies of `events` content events each."""
    (path / "raw").mkdir(parents=True)
    shutil.copy(RECORDING / "manifest.json", path)
    began_ns = _write_events(path / "raw" / "events.log", requests)
    rng = random.Random(1)
    with FrameLog(path / "raw" / "plan-measure.log") as plan, FrameLog(path / "raw" / "requests-0.log") as log:
        for index in range(requests):
            planned = PlannedRequest(
                index=index, phase="measure", workload_class="c", path="/v1/chat/completions", input_tokens=17,
                max_tokens=events, offset_ns=round(index * 1e9 / rate),
            )  # fmt: skip
            append_record(plan, planned)
            append_record(log, _part(planned, began_ns, list(chunks(f"chatcmpl-sl-1-{index:06d}", events, rng)), rng))
        append_record(plan, plan_end("measure"))
    if scraped:
        _write_scrapes(path / "raw" / "scrapes-0.log", began_ns, seconds=round(requests / rate) + 2)


def _write_events(path: Path, requests: int) -> int:
    """Write the recording's events without its warm-up, for `requests` of them; return when the load began, ns."""
    began_ns = 0
    with FrameLog(path) as log:
        for at_ns, kind, data in map(msgspec.msgpack.decode, read_frames(RECORDING / "raw" / "events.log")):
            if kind == "warmup" or data.get("phase") == "warmup":
                continue
            if kind == "planned":
                data["count"] = requests
            elif kind == "phase_start":
                began_ns = at_ns
            log.append(msgspec.msgpack.encode((at_ns, kind, data)))
    return began_ns


def _write_scrapes(path: Path, start_ns: int, seconds: int) -> None:
    """Write a page each second: counters go on as they went in the recording, the rest is what it was."""
    rows = [row for row in read_scrapes(RECORDING / "raw" / "scrapes-0.log") if isinstance(row, ScrapeRow)]
    rows = [row for row in rows if row.series is rows[-1].series]
    rises = np.array([series.type in ("counter", "histogram", "summary") for series in rows[0].series])
    log = ScrapeLog(path)
    for second in range(seconds):
        turns, row = divmod(second, len(rows) - 1)
        went = np.where(rises, turns * (rows[-1].values - rows[0].values), 0.0)
        at_ns = start_ns - 500_000_000 + second * 10**9
        page = _page(rows[row].series, rows[row].values + went)
        log.append(
            Scrape(
                url=rows[0].url, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns + 1_000_000, status=200, body=page
            )
        )
    log.close()


def _page(series: tuple[Series, ...], values: npt.NDArray[np.float64]) -> bytes:
    lines, family = [], ""
    for labelled, value in zip(series, values.tolist(), strict=True):
        if labelled.family != family:
            family = labelled.family
            lines.append(f"# TYPE {family} {labelled.type}")
        labels = ",".join(f'{name}="{text}"' for name, text in labelled.labels)
        lines.append(f"{labelled.name}{{{labels}}} {value!r}")
    return "\n".join((*lines, "")).encode()


def _part(planned: PlannedRequest, start_ns: int, pieces: list[bytes], rng: random.Random) -> RequestPart:
    submit_ns = start_ns + planned.offset_ns + 300_000
    reads_ns, read_ends = array("q"), array("q")
    at_ns = submit_ns + 90_000_000
    end = 0
    for piece in pieces:
        at_ns += STEP_NS + rng.randrange(2_000_000)
        end += len(piece)
        reads_ns.append(at_ns)
        read_ends.append(end)
    packed = pack(reads_ns, read_ends, b"".join(pieces))
    return RequestPart(
        index=planned.index, last=True, url="http://127.0.0.1:8000/v1/chat/completions",
        scheduled_ns=submit_ns - 300_000, dispatch_ns=submit_ns - 200_000, connected_ns=submit_ns - 20_000,
        submit_ns=submit_ns, reused=True, status=200, head=HEAD, end_ns=reads_ns[-1], reads_ns=packed.reads_ns,
        read_ends=packed.read_ends, body=packed.body, packing=packed.packing,
    )  # fmt: skip


def cpu_s(work: Callable[[], object], repeat: int) -> float:
    """CPU-seconds of a call in this process, the least of several."""
    least = float("inf")
    for _ in range(repeat):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def command(path: Path, repeat: int) -> tuple[float, float, float]:
    """Run `sidelight report` several times: the least CPU-seconds and seconds, and the most MB of a process of it."""
    cpus_s, took_s = [], []
    for _ in range(repeat):
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-m", "sidelight", "report", str(path)], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        took_s.append(time.monotonic() - began_s)
    return min(cpus_s), min(took_s), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3


def main() -> None:
    """Write the run, measure, and print a line a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=23)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--scraped", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="write the run directory here and leave it")
    parser.add_argument("--command-alone", action="store_true", help="leave out the steps, which hold all in memory")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        path = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        write_run(path, options.requests, options.events, options.rate, scraped=options.scraped)
        raw = path / "raw"
        if not options.command_alone:
            _print_steps(path, raw, options.repeat)
        cpu, took_s, peak_mb = command(path, options.repeat)
        print(f"{'sidelight report':45} {cpu:6.2f} CPU-s, {took_s:.2f} s, {peak_mb:.0f} MB in its largest process")
        for name in ("summary.json", "timeslices.parquet"):
            print(f"{name:45} {(path / name).stat().st_size / 1e6:6.2f} MB")


def _print_steps(path: Path, raw: Path, repeat: int) -> None:
    plan = list(read_plan(raw / "plan-measure.log"))
    parts = [record for record in read_log(raw / "requests-0.log") if isinstance(record, RequestPart)]
    steps: dict[str, Callable[[], object]] = {
        "read the frames": lambda: sum(1 for _ in read_log(raw / "requests-0.log")),
        "unpack the parts": lambda: [unpack(part) for part in parts],
        "assemble the table (unpacking and replies)": lambda: assemble(plan, parts, run_id="r"),
        "derive everything": lambda: _quietly(lambda: derive.derive(path)),
    }
    for name, work in steps.items():
        print(f"{name:45} {cpu_s(work, repeat):6.2f} CPU-s", flush=True)


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        work()


if __name__ == "__main__":
    main()
