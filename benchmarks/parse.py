"""Read metrics pages with our parsers and with prometheus-client's, in one run, and print times and ratios.

    python benchmarks/parse.py [RECORDING]

The pages are vLLM's: two that follow each other at 200 ms under load, of a recording (its `scrapes.jsonl.gz`), by
default of that in tests/data. They are brought to 100 kB and 1 MB as a server with more engines writes them: each line
with an engine's label stands once for each engine. So the engines' numbers change alike, as they do under load.

- first parse: `parse`, which remembers nothing between pages. First read: a new `PageReader`'s first page.
- next page: the reader has read the other of the two pages just before. Same page: the very same bytes again.

CPU time of the process, the least of `ROUNDS`; in each round every one of them is timed once, garbage collection on.
"""

from __future__ import annotations

import gzip
import json
import lzma
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sidelight.scraper.exposition import PageReader, parse

ROUNDS = 15
SIZES = (100_000, 1_000_000)
RECORDING = Path(__file__).parents[1] / "tests/data/vllm_scrapes.jsonl.xz"


def main() -> None:
    """Print a table for each size."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("prometheus-client", "msgspec", "numpy"))
    print(f"{packages}, Python {platform.python_version()}; CPU time, least of {ROUNDS} rounds")
    pair = _busiest_pair(list(pages(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING)))
    for size in SIZES:
        engines = next(n for n in range(1, 1000) if len(with_engines(pair[0], n)) >= 0.99 * size)
        before, after = (with_engines(page, engines) for page in pair)
        _report(engines, before, after)


def _report(engines: int, before: str, after: str) -> None:
    """Time every way of reading, and print a line for each."""
    texts = before.encode(), after.encode()
    text, other = PageReader(), PageReader()
    works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "prometheus-client": (lambda: None, lambda: list(text_string_to_metric_families(after))),
        "first parse": (lambda: None, lambda: parse(texts[1])),
        "first read": (lambda: None, lambda: PageReader().read(texts[1])),
        "next page": (lambda: text.read(texts[0]), lambda: text.read(texts[1])),
        "same page": (lambda: other.read(texts[1]), lambda: other.read(texts[1])),
    }
    least = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, (prepare, work) in works.items():
            prepare()
            least[name] = min(least[name], _timed(work))
    lines = before.split("\n"), after.split("\n")
    changed = sum(one != two for one, two in zip(*lines, strict=True))
    series = len(parse(texts[1]).series)
    print(f"\n{len(texts[1]) / 1e3:.0f} kB ({engines} engines, {series} series, {changed} lines differ)")
    for name, seconds in least.items():
        print(f"  {name:22}{1e3 * seconds:9.3f} ms {least['prometheus-client'] / seconds:9.1f} x")


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def pages(path: Path) -> Iterator[str]:
    """Give the pages of a recording: JSON lines, of which the first tells of the whole."""
    with (lzma.open if path.suffix == ".xz" else gzip.open)(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if page := row.get("page") or row.get("body"):
                yield page


def _busiest_pair(found: list[str]) -> tuple[str, str]:
    """Return the two neighbours with equal layouts that differ in most lines: the worst case for us."""

    def differing(pair: tuple[str, str]) -> int:
        one, two = (page.split("\n") for page in pair)
        same = [line.rpartition(" ")[0] for line in one] == [line.rpartition(" ")[0] for line in two]
        return sum(a != b for a, b in zip(one, two, strict=True)) if same else -1

    return max(pairwise(found), key=differing)


def with_engines(page: str, engines: int) -> str:
    """Write a page as a server with so many engines would: each line with an engine's label once for each."""
    lines: list[str] = []
    for of_engine, group in groupby(page.split("\n"), lambda line: line[:1] != "#" and 'engine="0"' in line):
        once = list(group)
        for engine in range(engines if of_engine else 1):
            lines += [line.replace('engine="0"', f'engine="{engine}"') for line in once] if of_engine else once
    return "\n".join(lines)


if __name__ == "__main__":
    main()
