"""Hooks of MkDocs (mkdocs.yml): the site has the addresses of release/identity.toml and the order of docs/README.md.

Links that leave docs/ lead into the repository, and lists are indented as Python's Markdown wants them.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = Path(__file__).parents[1]
IDENTITY = tomllib.loads((DOCS.parent / "release" / "identity.toml").read_text(encoding="utf-8"))
TREE = f"{IDENTITY['repository']}/blob/{os.environ.get('GITHUB_REF_NAME') or 'main'}"
_SECTION = re.compile(r"^\*\*(.+?)\*\*$(.*?)(?=^\*\*|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Set the addresses, and the navigation from the index."""
    config.site_url = IDENTITY["documentation"]
    # Not as repo_url: of that, readers' browsers would ask the forge for stars and releases.
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": IDENTITY["repository"], "name": "Source"}]
    config.nav = [{"Home": "README.md"}, *({name: pages(text)} for name, text in sections())]
    return config


def sections() -> list[tuple[str, str]]:
    """Return the headings of the index, each with the text below it."""
    return [(name, text) for name, text in _SECTION.findall((DOCS / "README.md").read_text(encoding="utf-8"))]


def pages(text: str) -> list[str]:
    """Return the pages that a part of the index links, and those of the folders that it links."""
    links = [link for _, link in _LINK.findall(text)]
    folders = {link: sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / link).glob("*.md")) for link in links}
    return [page for link in links for page in folders[link] or [link]]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page whose links hold on the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[2])
        if target.startswith("../"):
            return f"{match[1]}{TREE}/{target.removeprefix('../')}"
        first = next(iter(pages(f"]({target})")), target)  # of a folder, its first page
        return match[1] + os.path.relpath(first, folder)

    pieces = _FENCED.split(markdown)
    for position in range(0, len(pieces), 2):
        text = re.sub(r"^  (?=- )", "    ", pieces[position], flags=re.MULTILINE)
        pieces[position] = _LINK.sub(link, text)
    return "".join(pieces)
