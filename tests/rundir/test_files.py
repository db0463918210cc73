from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidelight.rundir.files import NotRegular, replace_file


def test_a_device_or_a_fifo_is_not_replaced(tmp_path: Path):
    """By who may write everywhere, `--output /dev/null` would destroy the device."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegular):
        replace_file(tmp_path / "pipe", lambda file: file.write(b"report"))
    assert ["pipe"] == [path.name for path in tmp_path.iterdir()]
    assert (tmp_path / "pipe").is_fifo()
