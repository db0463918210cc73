"""Damage to a run directory: what `sidelight report` says of logs that others tore, changed or forged.

- Of a run that ended by itself no damage is silent: exit 3, and the damaged log is named.
- Where only the payload of a record is another, with a right checksum of its frame, the end of the log knows better.
- Where everything was forged, the end and the manifest too, no number can be right, but nothing is a defect of ours, no
  report takes long or much memory, and nothing outside is read or written.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from faults.cases import Case, Kind, Setting, TooLongError, Try, cpu_limit, peak_mib
from golden_files import copied

from loadgen.records import RequestPart
from rundir.frames import FrameLog, read_frames
from rundir.framing import Framer
from scraper.series.log import LayoutRecord, RowRecord
from scraper.spans.log import ExportRecord
from sidecar import cli
from sidecar.directory import LOGS, MANIFEST, RAW, log_ends, write_json

BASES = ("vllm_spans", "two_engines", "sglang_trtllm")
DEFECT = "this is a defect"
DAMAGED = "recorded data are damaged"
MOST_CPU_S = 20.0
MOST_GROWTH_MIB = 300.0
encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How `sidelight report` ended, and what it took."""

    code: int
    out: str
    err: str
    growth_mib: float

    @property
    def wrong(self) -> str:
        """Return what no report may do, whatever lies in the directory."""
        if DEFECT in self.err or "Traceback" in self.err + self.out:
            return f"a defect: {self.err.strip()}"
        if self.code == 2 and (self.err.count("\n") != 1 or not self.err.startswith("sidelight: ")):
            return f"not one line: {self.err}"
        return f"{self.growth_mib:.0f} MiB" if self.growth_mib > MOST_GROWTH_MIB else ""


def report(path: Path) -> Report:
    """Run `sidelight report` in this process. Raises TooLongError."""
    out, err, before_mib = io.StringIO(), io.StringIO(), peak_mib()
    code = -1
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(), cpu_limit(MOST_CPU_S):
        warnings.simplefilter("default")  # as of a command: pytest makes errors of them
        try:
            cli.main(["report", str(path), "--formats", "json,csv,text"])
        except SystemExit as end:
            code = int(end.code or 0)
    return Report(code=code, out=out.getvalue(), err=err.getvalue(), growth_mib=peak_mib() - before_mib)


def frame_logs(run: Path) -> list[Path]:
    """Return the logs of a run that hold anything."""
    return sorted(log for log in (run / RAW).glob(LOGS) if log.stat().st_size)


def rewrite(log: Path, payloads: list[bytes]) -> None:
    """Write a log anew, numbers, checksums and end."""
    log.unlink(missing_ok=True)
    with FrameLog(log) as new:
        new.append(*payloads)


def state(run: Path) -> None:
    """Let the manifest state the ends that the logs have now."""
    manifest = json.loads((run / MANIFEST).read_text())
    manifest["logs"] = {name: end and msgspec.structs.asdict(end) for name, end in log_ends(run).items()}
    write_json(run / MANIFEST, manifest)


def recorded(name: str, into: Path) -> Path:
    """Copy a recorded run, its logs as they are written today: closed, and their ends in the manifest."""
    run = copied(name, into)
    for log in frame_logs(run):
        rewrite(log, list(read_frames(log)))
    state(run)
    return run


def changed(data: bytes, rng: random.Random) -> bytes:
    """Change up to five bytes."""
    new = bytearray(data)
    while new == data:
        for _ in range(rng.choice((1, 1, 2, 5))):
            new[rng.randrange(len(new))] = rng.randrange(256)
    return bytes(new)


# Damage: each changes a run, and returns nothing.


def truncate(run: Path, rng: random.Random) -> None:
    log = rng.choice(frame_logs(run))
    os.truncate(log, rng.randrange(log.stat().st_size))


def flip(run: Path, rng: random.Random) -> None:
    log = rng.choice(frame_logs(run))
    data = bytearray(log.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    log.write_bytes(data)


def overwrite(run: Path, rng: random.Random) -> None:
    """As a disk does that lost a sector, or found another's."""
    log = rng.choice(frame_logs(run))
    data = log.read_bytes()
    at, size = rng.randrange(len(data)), rng.randrange(1, 512)
    sector = rng.choice((bytes(size), rng.randbytes(size)))[: len(data) - at]
    new = data[:at] + sector + data[at + len(sector) :]
    log.write_bytes(new if new != data else data[:-1])


def delete(run: Path, rng: random.Random) -> None:
    rng.choice(frame_logs(run)).unlink()


def swap(run: Path, rng: random.Random) -> None:
    log, other = rng.sample(frame_logs(run), 2)
    data = log.read_bytes()
    log.write_bytes(other.read_bytes())
    other.write_bytes(data)


def drop_frame(run: Path, rng: random.Random) -> None:
    log = rng.choice(frame_logs(run))
    payloads = list(read_frames(log))
    del payloads[rng.randrange(len(payloads))]
    rewrite(log, payloads)


def repeat_frame(run: Path, rng: random.Random) -> None:
    log = rng.choice(frame_logs(run))
    payloads = list(read_frames(log))
    at = rng.randrange(len(payloads))
    rewrite(log, [*payloads[:at], payloads[at], *payloads[at:]])


def change_record(run: Path, rng: random.Random) -> None:
    """Change a payload; the checksum of its frame, and the end of the log, are right for what is there now."""
    log = rng.choice(frame_logs(run))
    payloads = list(read_frames(log))
    at = rng.randrange(len(payloads))
    rewrite(log, [*payloads[:at], changed(payloads[at], rng), *payloads[at + 1 :]])


def forge(run: Path, rng: random.Random) -> None:
    """Change, repeat, exchange or leave out records; all checksums, ends and the manifest fit."""
    rng.choice((change_record, change_record, change_record, drop_frame, repeat_frame, swap))(run, rng)
    state(run)


def change_manifest(run: Path, rng: random.Random) -> None:
    """Put something else into a field of the manifest, take it away, or tear the file."""
    path = run / MANIFEST
    if rng.random() < 0.1:
        os.truncate(path, rng.randrange(path.stat().st_size))
        return
    manifest = json.loads(path.read_text())
    *above, last = rng.choice(list(_places(manifest)))
    holder = manifest
    for key in above:
        holder = holder[key]
    new = rng.choice((..., None, "x", "", -1, 0, 2**70, 10**400, 1e308, float("nan"), [], {}, [[]], True, "\x1b[2J"))
    if new is ...:
        del holder[last]
    else:
        holder[last] = new
    path.write_text(json.dumps(manifest))


def _places(value: object, above: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Give the place of every field and item of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*above, key)
        yield from _places(item, (*above, key))


@cache
def bomb() -> bytes:
    """Return a quarter of a megabyte that unpacks to 256 MiB."""
    packing = zlib.compressobj(1)
    return b"".join(packing.compress(bytes(1 << 20)) for _ in range(256)) + packing.flush()


def bombs(run: Path, rng: random.Random) -> None:
    """Put what unpacks to more than a report may take into one log, forged throughout."""
    at_ns = json.loads((run / MANIFEST).read_text())["started_ns"]
    layout = LayoutRecord(id=0, url="http://x", series=bomb())
    row = RowRecord(layout=0, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns + 1, delta=bomb())
    part = RequestPart(index=0, seq=0, last=True, url="http://x/v1", status=200, head=b"HTTP/1.1 200 OK\r\n\r\n",
                       body=bomb(), reads_ns=b"", read_ends=b"", packing=0)  # fmt: skip
    huge = [encode(RequestPart(index=index, last=True, status=200, head=b"", end_ns=2**63 - 1, submit_ns=-(2**63)))
            for index in (0, 2**62)]  # fmt: skip
    name, payloads = rng.choice([
        ("scrapes-0.log", [encode(layout)]), ("scrapes-0.log", [encode(row)]), ("requests-0.log", [encode(part)]),
        ("spans-0.log", [encode(ExportRecord(received_ns=at_ns, via="grpc", packed=bomb()))]), ("requests-0.log", huge),
    ])  # fmt: skip
    log = run / RAW / name
    before = list(read_frames(log)) if log.exists() else []
    rewrite(log, [*before, *payloads])
    state(run)


def special_file(run: Path, rng: random.Random) -> None:
    """Put a link, a pipe, a device or a directory in the place of a log, or of a file that is written."""
    log = rng.choice(frame_logs(run))
    kind = rng.choice(("zero", "outside", "fifo", "directory"))
    log.unlink()
    match kind:
        case "zero":
            log.symlink_to("/dev/zero")
        case "outside":
            log.symlink_to(run.parent / "outside")
        case "fifo":
            os.mkfifo(log)
        case _:
            log.mkdir()
    (run / rng.choice(("summary.json", "report.txt"))).symlink_to(run.parent / "outside")


def garbage(run: Path, rng: random.Random) -> None:
    """Put arbitrary bytes, or what looks like the beginnings of frames, in the place of a log."""
    log = rng.choice(frame_logs(run))
    whole = Framer().frame(b"x" * 100)
    log.write_bytes(rng.choice((rng.randbytes(5_000), whole[:4] * 50_000, whole[:-1] * 500)))


# What is done, and how the report may end. Damage is said (3), and what is left is evaluated; of what no run can have
# recorded nothing may be left (2); and what fits throughout may be believed (0).
DAMAGE: dict[str, tuple[Callable[[Path, random.Random], None], tuple[int, ...]]] = {
    "truncate": (truncate, (3,)),
    "flip": (flip, (3,)),
    "overwrite": (overwrite, (3,)),
    "delete": (delete, (3,)),
    "swap": (swap, (3,)),
    "garbage": (garbage, (3,)),
    "drop-frame": (drop_frame, (3,)),
    "repeat-frame": (repeat_frame, (3,)),
    "special-file": (special_file, (3,)),
    "change-record": (change_record, (2, 3)),
    "forge": (forge, (0, 2, 3)),
    "change-manifest": (change_manifest, (0, 2, 3)),
    "bomb": (bombs, (0, 2, 3)),
}


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    bases = {name: recorded(name, setting.place) for name in BASES}

    def attempt(case: Case) -> str:
        rng, work = case.random(), setting.place / "case"
        shutil.rmtree(work, ignore_errors=True)
        run = Path(shutil.copytree(bases[rng.choice(BASES)], work / "run"))
        (work / "outside").write_text("untouched")
        damage, codes = DAMAGE[case.row]
        damage(run, rng)
        try:
            result = report(run)
        except TooLongError as error:
            return str(error)
        if result.wrong:
            return result.wrong
        if (work / "outside").read_text() != "untouched":
            return "a file outside of the directory was written"
        if result.code not in codes or (result.code == 3 and DAMAGED not in result.err):
            return f"exit {result.code}: {result.err.strip() or 'silent'}"
        return ""

    yield attempt


LOG_FAULTS = Kind(name="logs", rows=dict.fromkeys(DAMAGE, 4) | {"forge": 12, "change-manifest": 12}, opened=opened)
