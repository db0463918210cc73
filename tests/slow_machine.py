"""Run tests on a machine that is slow, again and again, and tell which of them fail and how often.

    python tests/slow_machine.py --times 10 tests/loadgen tests/test_watch.py

They have the lowest priority beside processes that spin. A test that fails here waits for somebody's machine: it takes
a duration for a fact, a sleep for an event, or a bound that is none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

# They end with us, however we end.
SPINNING = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    pass"
LOWEST = 19


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Let processes spin.

    Each is a session of its own: a kernel that shares processors out by session (autogroup) counts them beside the
    tests, and not among them, where the tests would get a seventieth.
    """
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", SPINNING], start_new_session=True)
            stack.enter_context(process)
            stack.callback(process.kill)
        yield


def failures(results: Path) -> list[str]:
    """Return the names of the tests that failed, as pytest takes them; of a run that broke off, that it did."""
    if not results.exists():
        return ["(pytest did not come to its end)"]
    return [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in ET.parse(results).iter("testcase")  # noqa: S314  written by our own pytest
        if case.find("failure") is not None or case.find("error") is not None
    ]


def repeated(arguments: Sequence[str], *, times: int) -> Counter[str]:
    """Run tests so often; return how often each of those that failed did."""
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, times + 1):
            results, begun_s = Path(directory) / f"{number}.xml", time.monotonic()
            command = ["nice", "-n", str(LOWEST), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            ended = subprocess.run([*command, f"--junitxml={results}", *arguments], check=False)
            names = failures(results) or (["(pytest itself)"] if ended.returncode else [])
            failed.update(names)
            print(f"{number} of {times}: {len(names)} failed, {time.monotonic() - begun_s:.0f} s", flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    """Run what the command line says; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--times", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--spinning", type=int, default=2, help="how many processes spin beside (default 2)")
    options, passed_on = parser.parse_known_args(arguments)  # the rest is pytest's
    with spinning(options.spinning):
        failed = repeated(passed_on, times=options.times)
    for name, count in failed.most_common():
        print(f"failed {count} of {options.times} times: {name}")
    if not failed:
        print(f"passed {options.times} of {options.times} times")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
