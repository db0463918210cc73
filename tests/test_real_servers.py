"""Whether the programs that load real engines and gateways start; what they check is run by hand and at night."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("program", ["live.engines", "live.gateways"])
def test_the_program_starts(program: str) -> None:
    command = [sys.executable, "-m", program, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}

    ended = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
