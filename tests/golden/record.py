"""Derive the recorded runs again and keep what comes: `python tests/golden/record.py [NAME...]`, all without names.

For a commit that changes derived files on purpose. Prints each field that differs, since a diff of compressed files
does not show it, and leaves files alone in which none does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml
from documents import sentences
from golden_files import GOLDEN, compare, derive, derived, expected, keep, names


def main(wanted: list[str]) -> None:
    """Keep the derived files of runs by their names, and without names the sentences of errors."""
    if not wanted:
        text = yaml.safe_dump(sentences(), width=120, allow_unicode=True)
        (GOLDEN / "errors.yaml").write_text(text, encoding="utf-8")
    for name in wanted or names():
        with tempfile.TemporaryDirectory() as place:
            new = derived(derive(name, Path(place)))
        different = list(compare(expected(name), new))
        for difference in different:
            print(f"{name}/{difference}")
        for file in sorted({difference.file for difference in different}):
            keep(name, file, new.get(file))


if __name__ == "__main__":
    main(sys.argv[1:])
