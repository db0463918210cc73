"""Damage to directories: logs and documents of runs, watches and studies that others tore, changed or forged."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from faults.bases import rewrite, state

from sidelight.loadgen.records import RequestPart
from sidelight.methodology.execution.record import LOG, STUDY, Stopped
from sidelight.recorded.directory import MANIFEST, RAW
from sidelight.rundir.frames import read_frames
from sidelight.rundir.framing import Framer
from sidelight.scraper.series.log import LayoutRecord, RowRecord
from sidelight.scraper.spans.log import ExportRecord

encode = msgspec.msgpack.Encoder().encode
Damage = Callable[[Path, random.Random], None]  # changes a directory


def frame_logs(path: Path) -> list[Path]:
    """Return the logs of a directory that hold anything; of a study its own, too, and as often as all others."""
    logs = sorted(log for log in path.rglob("*.log") if log.stat().st_size)
    return [*logs, *(log for log in logs if log.name == LOG for _ in logs)]


def documents(path: Path) -> list[Path]:
    """Return the files of a directory that say what was asked."""
    return sorted(file for name in (MANIFEST, STUDY) for file in path.rglob(name))


def changed(data: bytes, rng: random.Random) -> bytes:
    """Change up to five bytes."""
    new = bytearray(data)
    while new == data:
        for _ in range(rng.choice((1, 1, 2, 5))):
            new[rng.randrange(len(new))] = rng.randrange(256)
    return bytes(new)


# Each changes a directory: `run` is that of a run or a watch, or of a study with its steps.


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


def delete(path: Path, rng: random.Random) -> None:
    rng.choice(frame_logs(path)).unlink()


def swap(run: Path, rng: random.Random) -> None:
    logs = sorted({*frame_logs(run)})
    if len(logs) == 1:  # of a study that was killed in its first step
        delete(run, rng)
        return
    log, other = rng.sample(logs, 2)
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
    """Put something else into a field of a manifest or the like, take it away, or tear the file."""
    path = rng.choice(documents(run))
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
    manifest = rng.choice(sorted(run.rglob(MANIFEST)))
    at_ns = json.loads(manifest.read_text())["started_ns"]
    layout = LayoutRecord(id=0, url="http://x", series=bomb())
    row = RowRecord(layout=0, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns + 1, delta=bomb())
    part = RequestPart(index=0, seq=0, last=True, url="http://x/v1", status=200, head=b"HTTP/1.1 200 OK\r\n\r\n",
                       body=bomb(), reads_ns=b"", read_ends=b"", packing=0)  # fmt: skip
    huge = [encode(RequestPart(index=index, last=True, status=200, head=b"", end_ns=2**63 - 1, submit_ns=-(2**63)))
            for index in (0, 2**62)]  # fmt: skip
    name, payloads = rng.choice([
        ("scrapes-0.log", [encode(layout)]), ("scrapes-0.log", [encode(row)]), ("requests-0.log", [encode(part)]),
        ("spans-0.log", [encode(ExportRecord(received_ns=at_ns, via="grpc", packed=bomb()))]), ("requests-0.log", huge),
        (LOG, [encode(Stopped(at_ns=at_ns, status="partial", reason="x" * 2**24))]),
    ])  # fmt: skip
    log = run / LOG if name == LOG and run != manifest.parent else manifest.parent / RAW / name
    before = list(read_frames(log)) if log.exists() else []
    rewrite(log, [*before, *payloads])
    state(run)


def special_file(path: Path, rng: random.Random) -> None:
    """Put a link, a pipe, a device or a directory in the place of a file, and of one that is written."""
    file = rng.choice([*frame_logs(path), *documents(path)])
    outside = path.parent / "outside"
    file.unlink()
    match rng.choice(("zero", "outside", "fifo", "directory")):
        case "zero":
            file.symlink_to("/dev/zero")
        case "outside":
            file.symlink_to(outside)
        case "fifo":
            os.mkfifo(file)
        case _:
            file.mkdir()
    derived = path / rng.choice(("summary.json", "result.json", "report.txt"))
    derived.unlink(missing_ok=True)
    derived.symlink_to(outside)


def garbage(run: Path, rng: random.Random) -> None:
    """Put arbitrary bytes, or what looks like the beginnings of frames, in the place of a log."""
    log = rng.choice(frame_logs(run))
    whole = Framer().frame(b"x" * 100)
    log.write_bytes(rng.choice((rng.randbytes(5_000), whole[:4] * 50_000, whole[:-1] * 500)))


DAMAGE: dict[str, Damage] = {
    "truncate": truncate,
    "flip": flip,
    "overwrite": overwrite,
    "delete": delete,
    "swap": swap,
    "garbage": garbage,
    "drop-frame": drop_frame,
    "repeat-frame": repeat_frame,
    "special-file": special_file,
    "change-record": change_record,
    "forge": forge,
    "change-manifest": change_manifest,
    "bomb": bombs,
}
