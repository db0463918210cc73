"""The library surface: what `import sidelight` offers, on recorded runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from codes import raises

import sidelight
from sidelight.correlator.attribute import attribute
from sidelight.scraper.quantiles import estimate
from sidelight.sidecar.report.derive import derive
from sidelight.sidecar.run import open_run

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests/golden"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a copy of a recorded run without its derived files."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copy(GOLDEN / "vllm_spans/manifest.json", path)
    shutil.copytree(GOLDEN / "vllm_spans/raw", path / "raw")
    return path


def test_what_is_offered_is_what_is_documented():
    """`__all__` lists every public name, and docs/reference/library.md has a heading for each function."""
    public = set(dir(sidelight))
    assert public == set(sidelight.__all__)
    document = (REPOSITORY / "docs/reference/library.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## `(\w+)", document, flags=re.MULTILINE))
    assert headings == {name for name in sidelight.__all__ if name.islower()} | {"Run"}


def test_an_installation_has_one_name():
    """The folders at the root are in it by links; a module of the user's may be called `exporter`."""
    tools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    links = {path.name: str(path.readlink()) for path in (REPOSITORY / "sidelight").iterdir() if path.is_symlink()}
    assert ["sidelight"] == tools["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {f"/sidelight/{name}" for name in links} == set(tools["hatch"]["build"]["targets"]["sdist"]["exclude"])
    assert links.keys() == tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"].keys()
    folders = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"sidelight"}
    assert {name: f"../{name}" for name in folders} == links


def test_the_tables_are_the_derived_files(recorded: Path):
    """`requests` and `timeslices` hold the rows that `sidelight report` writes, and reading writes nothing."""
    before = sorted(recorded.rglob("*"))
    run = sidelight.open_run(recorded)
    tables = {name: run.arrow(name) for name in ("requests", "timeslices")}
    summary = sidelight.summary(recorded)
    assert before == sorted(recorded.rglob("*"))
    derive(recorded)
    for name, table in tables.items():
        assert table.equals(pq.read_table(recorded / f"{name}.parquet"))
    written = json.loads((recorded / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(msgspec.json.encode(summary)) == written


def test_chunks_and_scrapes_are_whole(recorded: Path):
    """As many chunks as the log has, in a request's order; each value that a page showed, with its labels."""
    run = sidelight.open_run(recorded)
    chunks, scrapes = run.arrow("chunks"), run.arrow("scrapes")
    assert len(run.requests.chunk_ns) == chunks.num_rows > 0
    assert set(chunks["request_id"].to_pylist()) <= set(run.requests.request_id)
    assert sum(int((~np.isnan(endpoint.values)).sum()) for endpoint in run.scrapes) == scrapes.num_rows > 0
    running = [row for row in scrapes.to_pylist() if row["name"] == "vllm:num_requests_running"]
    assert len(run.scrapes[0].at_ns) == len(running)
    assert {"engine", "model_name"} <= {name for name, _ in running[0]["labels"]}


def test_estimates_are_those_of_the_contract(recorded: Path):
    """The stable names are the functions that checks call."""
    assert (sidelight.attribute, sidelight.estimate_quantiles) == (attribute, estimate)
    run, log = sidelight.open_run(recorded), open_run(recorded)
    table = sidelight.attribute(run.requests, run.scrapes)
    np.testing.assert_array_equal(attribute(log.requests, log.endpoints).queue_s, table.queue_s)
    assert np.isfinite(table.queue_s).any()


def test_what_is_not_there_is_refused_by_name(recorded: Path, tmp_path: Path):
    """A directory that holds no run, which names the newest below it, and a table that does not exist."""
    with raises("run.none", says=f"such as the newest, {re.escape(str(recorded))}$"):
        sidelight.open_run(tmp_path)
    with pytest.raises(ValueError, match="'spans': no such table; choose from requests, chunks, scrapes, timeslices"):
        sidelight.open_run(recorded).arrow("spans")  # type: ignore[arg-type]  # what a user may type


def test_a_run_is_shown_in_a_line_and_typed(recorded: Path):
    """In a notebook its tables would fill pages; type checkers read the package only with its marker."""
    assert re.fullmatch(r"<Run .* requests, \d+ metrics pages?>", repr(sidelight.open_run(recorded)))
    assert (Path(sidelight.__file__).parent / "py.typed").is_file()


def test_the_package_can_be_run():
    """As `python -m sidelight`."""
    ended = subprocess.run([sys.executable, "-m", "sidelight", "--version"], capture_output=True, check=True, text=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\s*", ended.stdout)
