"""What the page of a study draws: layers that stand on each other, and axes that hold every value."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

NODE = shutil.which("node")
PROGRAM = """
const [scripts, call] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const document = { getElementById: () => ({ textContent: "{}" }) };
const load = new Function("document", "keepDrawn", "colour", `${scripts.join("\\n")}; return (${call});`);
process.stdout.write(JSON.stringify(load(document, () => {}, () => "")));
"""


def evaluated(call: str) -> Any:
    """Return what an expression of the page's script is, without a browser."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    folder = resources.files("sidelight.exporter.html") / "assets"
    scripts = [
        (folder / name).read_text(encoding="utf-8").removeprefix('"use strict";') for name in ("hues.js", "study.js")
    ]
    given = json.dumps([scripts, call])
    return json.loads(
        subprocess.run([NODE, "-e", PROGRAM], input=given, check=True, capture_output=True, text=True).stdout
    )


def test_layers_stand_on_those_below_from_left_to_right():
    """Whatever the order in which their places came; what is not known of a layer lifts nothing."""
    line = {"x": [2, 1, 3], "low": [None, None, None], "high": [None, None, None]}
    lines = [{"name": "a", "y": [1, 2, None], **line}, {"name": "b", "y": [10, 20, 30], **line}]
    lower, upper = evaluated(f"curvesOf({json.dumps({'kind': 'stack', 'lines': lines})})")
    assert [(point["x"], point["y"]) for point in lower["points"]] == [(1, 2), (2, 1), (3, None)]
    assert [(point["x"], point["base"], point["y"]) for point in upper["points"]] == [
        (1, 2, 22),
        (2, 1, 11),
        (3, 0, 30),
    ]


def test_an_axis_holds_every_value():
    """A linear one begins at zero where it may; a logarithmic one leaves out what is not above it."""
    linear, logarithmic, empty = evaluated(
        "[span([3, 8, null], false, true), span([0, 2, 200], true), span([null], true)]"
    )
    assert linear["low"] == 0
    assert 8 < linear["high"] < 9
    assert 0 < logarithmic["low"] < 2
    assert logarithmic["high"] > 200
    assert (empty["low"], empty["high"]) == (1, 10)
