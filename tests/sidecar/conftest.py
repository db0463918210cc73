"""The command line in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Ended

from sidecar import cli


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
