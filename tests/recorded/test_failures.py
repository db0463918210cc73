"""Errors in reading logs are counted, but not a bound on this process."""

from __future__ import annotations

import pytest
from codes import raises

from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.failures import ErrorCount


def test_the_first_error_of_a_block_is_counted(caplog: pytest.LogCaptureFixture):
    """Each is, and the first is logged with its consequence."""
    errors = ErrorCount("a row is lost")
    for error in (ValueError("x"), ZeroDivisionError("y")):
        with errors.guard():
            raise error
    assert 2 == errors.count
    assert ["a row is lost"] == [record.message for record in caplog.records]


def test_a_bound_that_runs_out_in_a_block_ends_the_command(caplog: pytest.LogCaptureFixture):
    """What was read is not to blame."""
    errors = ErrorCount("a row is lost")
    with raises("report.time"), errors.guard():
        raise ConfigurationError("report.time", "more than 32 s")
    assert 0 == errors.count
    assert not caplog.records
