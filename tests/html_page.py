"""A page of HTML, taken apart: its elements, its tables and its texts."""

from __future__ import annotations

from html.parser import HTMLParser

ATTACK = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """The elements of a page, the text of its tables by row, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": [], "p": []}
        self.stack: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in self.contents:
            self.contents[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        if {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data
        for tag in self.contents:
            if tag in self.stack:
                self.contents[tag][-1] += data
