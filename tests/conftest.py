"""Settings of all tests, what was recorded for them, and the command line in their own process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from certificates import Authority, established
from hypothesis import settings
from processes import Ended
from skips import in_ci, is_expected

from sidelight.sidecar.cli import app as cli

# A busy machine does not refute a law. Each run of the suite draws other examples: fifty of them are enough at a time.
settings.register_profile("sidelight", deadline=None, max_examples=50)
settings.load_profile("sidelight")

# looptime asks the policy for "the" loop around synchronous tests too, and a policy without a loop makes one
# that is never closed: a ResourceWarning, hence an error. With None set, it makes none.
asyncio.set_event_loop(None)

# aiohttp reads the certificates of this machine twice whenever it is imported, a tenth of a second of each of a
# thousand processes. Tests trust their own authority alone.
os.environ |= {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}

# nohup ignores SIGHUP, and a shell SIGINT of what it puts in the background; child processes inherit that, and
# Sidelight honours it. Tests that send signals start from the defaults, wherever they were started from.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Begin to collect elsewhere in each process where several run side by side: on a clean clone each then compiles a
    part of the tests for all, in place of all of them for itself.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        here = Path(__file__).parent
        places = sorted(map(str, [*here.glob("test_*.py"), *here.glob("[a-z]*/")]))
        first = int(worker["workerid"].removeprefix("gw")) * len(places) // worker["workercount"]
        config.args = [*places[first:], *places[:first]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests of whole processes where several run side by side: they take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (len(item.path.parts), item.path))


def pytest_collection_finish() -> None:
    """Let no garbage collection look through eight thousand tests again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a skip as a failure where nothing may go untested, but for those that need another machine."""
    report = yield
    if report.skipped and in_ci() and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not is_expected(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped where nothing may be (tests/skips.py): {reason}"
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of research and recorded fixtures; what needs it is skipped where it is absent."""
    path = Path(os.environ.get("SIDELIGHT_SHARED", Path(__file__).parents[2] / "shared"))
    if not (path / "fixtures").is_dir():
        pytest.skip(f"no recorded fixtures at {path}")
    return path


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates of servers and clients."""
    return established(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def sidelight(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ended]:
    """Run a command in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIDELIGHT_API_KEY", raising=False)

    def run(*arguments: str | Path) -> Ended:
        # A configuration file configures the application, which a process has once.
        monkeypatch.setattr(cli.app, "config", ())
        with pytest.raises(SystemExit) as ended:
            cli.main(list(map(str, arguments)))
        shown = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code=code, out=shown.out, err=shown.err, path=tmp_path)

    return run
