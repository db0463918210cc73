"""What tables show of numbers and settings."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

from sidelight.rundir.printable.numbers import cell, count_of, ms, setting
from sidelight.sidecar.options.fields import read_seconds
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions


def test_every_duration_of_a_configuration_has_its_unit():
    """Those that a command line reads as seconds."""
    hints = {of: get_type_hints(of, include_extras=True) for of in (RunOptions, ScrapeOptions, WatchOptions)}
    durations = {
        field.name
        for of, hint_by_name in hints.items()
        for field in fields(of)
        if any(
            getattr(about, "converter", None) is read_seconds
            for about in getattr(hint_by_name[field.name], "__metadata__", ())
        )
    }
    assert {"duration", "scrape_interval"} <= durations
    assert dict.fromkeys(durations, "2.5 s") == {name: setting(name, 2.5) for name in durations}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("rate", 4.0, "4 requests/s"),
        ("request_timeout", 0.001, "0.001 s"),
        ("burstiness", 0.125, "0.125"),
        ("seed", 2**53 + 1, "9007199254740993"),
        ("url", ["http://a", "http://b"], "http://a, http://b"),
        ("reuse", True, "true"),
    ],
)
def test_a_setting_is_shown_in_full(name: str, value: object, shown: str):
    """As it would be given again."""
    assert shown == setting(name, value)


def test_a_number_of_three_hundred_digits_takes_no_room():
    """As a server may say it: the other columns of its table stay readable."""
    assert ("1e+308", "-1e+300", "999,999,999") == (cell(1e308), ms(-1e300), cell(999_999_999))
    assert cell(int(1e300)) == "1e+300"


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 request"), (1.0, "1 request"), (0, "0 requests"), (2000, "2,000 requests")]
)
def test_a_count_of_one_is_in_the_singular(count: float, said: str):
    assert said == count_of(count, "request")
