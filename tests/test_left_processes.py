"""A test that fails leaves no process, no thread and no port."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit

import pytest
from processes import Script, alive, child_processes, children, engine, serving, start


class FailedError(Exception):
    """What a test that fails raises."""


def test_a_failing_test_leaves_no_server():
    before = set(threading.enumerate())
    with pytest.raises(FailedError), serving(Script()) as url:
        raise FailedError
    assert before == set(threading.enumerate())
    with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
        pass


def test_a_failing_test_leaves_no_engine():
    with pytest.raises(FailedError), engine() as (_, process):
        raise FailedError
    assert not alive(process.pid)


def test_a_failing_test_leaves_no_command():
    """One that would go on for ever, were it waited for."""
    with pytest.raises(FailedError), start("simulate", "--port", "0", fresh=True) as process:
        raise FailedError
    assert not alive(process.pid)


def test_a_child_is_known_by_its_whole_name():
    """The receiver's has the scraper's, and an option may have any."""
    with engine("--truth", "/dev/null", fresh=True) as (_, process):
        assert [process.pid] == child_processes(os.getpid(), "sidelight.simulator", "sidelight.simulat")
        assert [] == child_processes(os.getpid(), "sidelight.simul", "sidelight.simulator.engine")
        assert "simulator" in children(os.getpid())[process.pid]
