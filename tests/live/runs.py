"""`sidelight run` against a real server, and what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run that has ended: its directory, exit code, report, and the load average of the machine at its end."""

    directory: Path
    code: int
    report: str
    load_average: float

    @property
    def summary(self) -> dict[str, Any]:
        """Return summary.json."""
        loaded: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return loaded

    def requests(self) -> list[dict[str, Any]]:
        """Return the rows of requests.parquet."""
        rows: list[dict[str, Any]] = pq.read_table(self.directory / "requests.parquet").to_pylist()
        return rows


def measure(directory: Path, *options: str) -> Measured:
    """Run `sidelight run` with these options. Raises RuntimeError where it did not end with results."""
    command = [sys.executable, "-m", "sidelight", "run", *options, "--listen", "off", "--out", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode not in {0, 1}:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return Measured(directory=directory, code=ended.returncode, report=ended.stdout, load_average=os.getloadavg()[0])
