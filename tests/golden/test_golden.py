"""Recorded runs say what they said: whatever is derived from them is what was derived when it was last looked at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from golden_files import FORMATS, GOLDEN, MANIFEST, RAW, compare, copied, derive, derived, expected, names
from processes import sidelight

from sidelight.rundir.clock import anchor
from sidelight.sidecar.live.view import LiveRun
from sidelight.sidecar.report.derive import derive_run

SHOWN = 20
LOOKS = 23  # at the growing logs; few frames end where one of that many pieces does
AGAIN = "if this is meant, `python tests/golden/record.py` keeps it"


Evaluated = Callable[[str], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Return the directory in which a recorded run was derived, once for all tests."""
    return cache(lambda name: derive(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", names())
def test_a_recorded_run_derives_to_what_was_kept(run: Evaluated, name: str):
    """Every derived file of every format, field by field."""
    different = list(compare(expected(name), derived(run(name))))
    shown = "\n".join(map(str, islice(different, SHOWN)))
    assert not different, f"{len(different)} differences, {AGAIN}; the first:\n{shown}"


def files(place: Path) -> dict[str, bytes]:
    """Return the derived files of a run directory."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name not in (MANIFEST, RAW)}


def test_a_run_derives_to_the_same_bytes_wherever_it_lies(run: Evaluated, tmp_path: Path):
    """The directory's path stands in no derived file, and nothing is drawn at random; by the command line too."""
    place = copied("two_engines", tmp_path)
    assert 0 == sidelight("report", place, "--formats", ",".join(FORMATS)).code
    assert files(run("two_engines")) == files(place)


@pytest.mark.parametrize("name", names())
def test_a_run_read_as_it_went_is_reported_as_one_read_afterwards(run: Evaluated, name: str, tmp_path: Path):
    """Every derived file of every format, with the breakdown of the live page reading along from the start."""
    (tmp_path / RAW).mkdir()
    shutil.copy(GOLDEN / name / MANIFEST, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text(encoding="utf-8"))
    logs = {path.name: path.read_bytes() for path in (GOLDEN / name / RAW).iterdir()}
    protocol = manifest["config"].get("endpoint", "chat")
    with LiveRun(
        tmp_path, run_id=manifest["run_id"], clock=anchor(), planned_s=None, stale_s=9.0, protocol=protocol
    ) as live:
        for look in range(LOOKS):
            live.snapshot()
            for log, data in logs.items():
                step = len(data) if log.startswith("plan-") else -(-len(data) // LOOKS)
                with (tmp_path / RAW / log).open("ab") as file:
                    file.write(data[look * step : (look + 1) * step])
            live.poll()
        assert 0 == live.errors
        derive_run(live.logs.run(), FORMATS)
    assert files(run(name)) == files(tmp_path)


def test_every_kind_of_run_is_there():
    """None was lost: a missing directory would be a test that never fails."""
    assert names() == ["sglang_trtllm", "torn", "two_engines", "vllm_plain", "vllm_spans"]
    assert "status" not in json.loads((GOLDEN / "torn" / "manifest.json").read_text(encoding="utf-8"))


def fields(old: str, new: str, file: str = "summary.json") -> list[str]:
    """Return how the differences of one file read."""
    return [str(difference) for difference in compare({file: old}, {file: new})]


@pytest.mark.parametrize(
    ("old", "new", "read"),
    [
        ('{"a": {"p99": 1.5}}', '{"a": {"p99": 1.6}}', ["summary.json: a.p99: 1.5 -> 1.6"]),
        ('{"a": [1, 2]}', '{"a": [1]}', ["summary.json: a[1]: 2 -> nothing"]),
        ('{"a": 0.1}', '{"a": 0.10000000000000002}', []),
        ('{"a": 7e-17}', '{"a": -7e-17}', []),
        ('{"a": NaN}', '{"a": NaN }', ['summary.json: layout: "{\\"a\\": NaN}" -> "{\\"a\\": NaN }"']),
        ('{"a": 1}', '{"a": 1.0}', ["summary.json: a: 1 -> 1.0"]),
        (
            '{"a": 1700000000000000000}',
            '{"a": 1700000000000000001}',
            ["summary.json: a: 1700000000000000000 -> 1700000000000000001"],
        ),
        (
            '{"a": 1, "b": null}',
            '{"b": null, "a": 1}',
            ['summary.json: whole, order of keys: ["a", "b"] -> ["b", "a"]'],
        ),
        ('{"a": true}', '{"a": 1}', ["summary.json: a: true -> 1"]),
    ],
)
def test_a_difference_names_its_field(old: str, new: str, read: list[str]):
    """Rounding on another CPU is not a difference; another stamp, order, type or layout is."""
    assert read == fields(old, new)


def test_a_difference_in_a_table_names_row_and_column():
    """CSV by line and header, JSON lines by line, Parquet by row."""
    assert ["m.csv: line 5.mean: 2.5 -> 2.75"] == fields(
        "a,b\n1,2\n\nname,mean\nx,2.5\n", "a,b\n1,2\n\nname,mean\nx,2.75\n", "m.csv"
    )
    assert ["m.jsonl: line 2.v: 1 -> 2"] == fields('{"v": 1}\n{"v": 1}\n', '{"v": 1}\n{"v": 2}\n', "m.jsonl")
    rows = '{"columns": {"v": "int64"}, "metadata": {}}\n{"v": 1}\n'
    assert ['m.parquet: schema.columns.v: "int64" -> "double"', "m.parquet: row 1.v: 1 -> 1.5"] == fields(
        rows, rows.replace("int64", "double").replace(": 1}", ": 1.5}"), "m.parquet"
    )


def test_a_file_that_came_or_went_is_a_difference():
    """Named, with the beginning of what it holds."""
    read = [str(difference) for difference in compare({"a.txt": "x", "b.txt": "y"}, {"a.txt": "x", "c.txt": "z"})]
    assert ['b.txt: whole: "y" -> nothing', 'c.txt: whole: nothing -> "z"'] == read
