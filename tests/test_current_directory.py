"""Modules that lie in the current directory, as in a run of others, are not imported by our processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import golden_files
import pytest
from waiting import BOUND_S

# What our processes import, or would if it were installed.
PLANTED = ("msgspec", "numpy", "scipy", "uvloop", "grpc", "aiohttp", "pandas", "loadgen", "rundir", "sitecustomize")
MODULE = """
import pathlib, sys
pathlib.Path(__file__).with_name("imported").write_text(" ".join(sys.argv))
raise SystemExit(9)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "."),
        ("demo", "--duration", "1", "--listen", "off", "--quiet", "--out", "demo"),
    ],
    ids=["report", "demo"],
)
def test_no_module_of_the_current_directory_is_imported(arguments: tuple[str, ...], tmp_path: Path):
    """A demo has all of our children: engine, load worker, scraper, receiver."""
    path = golden_files.copied("two_engines", tmp_path)
    for name in PLANTED:
        (path / f"{name}.py").write_text(MODULE)
    command = [sys.executable, "-P", "-m", "sidelight", *arguments]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert (0, False) == (done.returncode, (path / "imported").exists()), done.stderr
