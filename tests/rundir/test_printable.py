"""Values as a line of blocks, and texts of others as a person may see them."""

from __future__ import annotations

import json

import pytest

from sidelight.rundir.printable.text import (
    LONGEST,
    LONGEST_WORD,
    defused,
    printable,
    printable_json,
    printable_lines,
    sparkline,
)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 1.0, None, 2.0], "▁▅ █"),
        ([1811.969102, -1.0], "█▁"),  # seven times it, divided by it, is more than seven
        ([0.0, 0.0], "▁▁"),
        ([], ""),
    ],
)
def test_heights_are_shares_of_the_largest_value(values: list[float | None], line: str):
    """The largest is always the highest block."""
    assert line == sparkline(values)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\x9b31m\u202eb\u200d", "a\\x9b31m\\u202eb\\u200d"),
        ("zwölf µs", "zwölf µs"),
        ("w" * (LONGEST_WORD + 1), "w" * LONGEST_WORD + "..."),
        ("a word and " + "w" * 300, "a word and " + "w" * LONGEST_WORD + "..."),
        ("so many words " * 1000, ("so many words " * 1000)[:LONGEST] + "..."),
    ],
)
def test_a_text_of_others_moves_no_cursor_and_fills_no_page(text: str, shown: str):
    """Controls of terminals and of the direction of text, and what has no width, are escaped; long words are cut."""
    assert shown == printable(text)


def test_lines_of_a_traceback_stay_lines():
    assert "a\n  \\x1b[2J\n" == printable_lines("a\n  \x1b[2J\n")


@pytest.mark.parametrize("text", ["\x9b\u202e\ufeff", "plain", 'with "quotes" \\ and ünïcode\n'])
def test_json_without_controls_says_the_same(text: str):
    """Written as escapes of JSON; line breaks between fields stay."""
    written = json.dumps({"text": [text]}, indent=2, ensure_ascii=False)
    shown = printable_json(written)
    assert {"text": [text]} == json.loads(shown)
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(1)", "'@SUM(1)"),
        ("-2+3", "'-2+3"),
        (" =1", "' =1"),
        ("\t=1", "\\x09=1"),
        ("-2", "-2"),
        ("+1e-3", "+1e-3"),
        ("-Inf", "-Inf"),
        ("a=1", "a=1"),
        ("\x1b[2J", "\\x1b[2J"),
        ("w" * 300, "w" * 300),
    ],
)
def test_a_cell_is_no_formula(text: str, cell: str):
    """An apostrophe stands before what a spreadsheet would compute; numbers and long texts stay whole."""
    assert cell == defused(text)
