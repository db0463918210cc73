"""Write what release/identity.toml says of the publisher, and the version, into each file that repeats it.

python release/identity.py [--check]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "OWNER"
# File, expression whose group is what is written, and what is written there.
PLACES = (
    (".github/CODEOWNERS", r"^\* @(\S+)$", "{owner}"),
    (".github/ISSUE_TEMPLATE/config.yml", r"url: (\S+)/security/", "{repository}"),
    (".github/ISSUE_TEMPLATE/config.yml", r"url: (\S+)/troubleshooting/", "{documentation}/latest"),
    (".github/workflows/release.yml", r"^  IMAGE: (\S+)$", "{image}"),
    ("CITATION.cff", r"^version: (\S+)$", "{version}"),
    ("CITATION.cff", r"^repository-code: (\S+)$", "{repository}"),
    ("CITATION.cff", r"^url: (\S+)$", "{documentation}"),
    ("SECURITY.md", r"\]\((\S+)/security/advisories/new\)", "{repository}"),
    ("docs/how-to/install.md", r"host (\S+):\S+ run", "{image}"),
    ("docs/how-to/install.md", r"host \S+:(\S+) run", "{version}"),
    ("docs/how-to/install.md", r"--owner (\S+)$", "{owner}"),
    ("docs/how-to/kubernetes.md", r"newName: ([^\s,]+), newTag:", "{image}"),
    ("docs/how-to/kubernetes.md", r"newTag: (\S+?)\}", "{version}"),
)


def identity() -> dict[str, str]:
    """Return the publisher's names and addresses, and the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = tomllib.loads((ROOT / "release" / "identity.toml").read_text(encoding="utf-8"))
    return {**stated, "version": project["version"]}


def placeholders(values: dict[str, str]) -> list[str]:
    """Return the names of values that nobody has filled in."""
    return [name for name, value in values.items() if PLACEHOLDER in value]


def updated(text: str, pattern: str, value: str) -> str:
    """Return a text with a value in each place of a pattern. Raises LookupError where there is none."""
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if not found:
        raise LookupError(pattern)
    for match in reversed(found):
        text = text[: match.start(1)] + value + text[match.end(1) :]
    return text


def filled_in(name: str, values: dict[str, str]) -> str:
    """Return a file's text with these values in its places."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for _, pattern, form in (place for place in PLACES if place[0] == name):
        text = updated(text, pattern, form.format(**values))
    return text


def main(arguments: list[str]) -> int:
    """Write all files, or with --check name those that differ; return the exit code."""
    texts = {name: filled_in(name, identity()) for name, _, _ in PLACES}
    different = {name: text for name, text in texts.items() if text != (ROOT / name).read_text(encoding="utf-8")}
    if different and "--check" in arguments:
        names = ", ".join(different)
        print(f"not as release/identity.toml says: {names}; run python release/identity.py", file=sys.stderr)
        return 1
    for name, text in different.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
