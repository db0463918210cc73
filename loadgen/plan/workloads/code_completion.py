"""The draft's Code Completion workload from a file of The Stack, Parquet or JSON lines.

A row has `content`, its language (`lang` or `language`) and, to share contexts by, its repository
(`max_stars_repo_name`, `repo_name`, `repository_name` or `repo`). The functions of the three languages are cut out, and
a request asks to go on with one from a line inside its body; four of five begin with one of ten repository contexts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sidelight.loadgen.plan.tokenizers.reference import reference
from sidelight.loadgen.plan.workloads.content import LANGUAGES
from sidelight.loadgen.plan.workloads.distributions import whole
from sidelight.loadgen.plan.workloads.fields import WorkloadError, about_file, file_state, unreadable
from sidelight.loadgen.plan.workloads.mix import choose, endless_order, stream_rng
from sidelight.loadgen.plan.workloads.reference import CODE_OUTPUT, REPOSITORIES
from sidelight.loadgen.plan.workloads.request import Shared, WorkloadRequest
from sidelight.rundir.printable.numbers import agree

NAME = "code-completion"

MOST_FUNCTIONS = 20_000
_CURE = "give a Parquet or JSON lines file of The Stack"
_LEAST_LINES = 3
_MOST_LINES = 400
_BLOCK = 256
_BATCH_ROWS = 256
_CHARACTERS_A_TOKEN = 8  # more than any code has on average, so that a context is long enough
_REPOSITORY_KEYS = ("max_stars_repo_name", "repo_name", "repository_name", "repo")
_LANGUAGE_KEYS = ("lang", "language")
_CONTENT_STREAM, _ORDER_STREAM, _SHARE_STREAM, _CUT_STREAM, _OUTPUT_STREAM = 201, 202, 203, 204, 205

_PYTHON = re.compile(r"([ \t]*)(?:async )?def \w+\(")
_BRACED = re.compile(r"^[ \t]*(?:export )?(?:default )?(?:async )?function\b[^\n]*\{[ \t]*$", re.MULTILINE)
_MARKS = re.compile(r"[{}\n]")


@dataclass(slots=True)
class Corpus:
    """Functions in the order of the file, and the texts of each repository."""

    functions: list[str] = field(default_factory=list)
    repositories: dict[str, list[str]] = field(default_factory=dict)
    rows: int = 0
    used: int = 0


def read(path: Path) -> tuple[Corpus, dict[str, Any]]:
    """Return the code of a file and the report's description of it.

    At most 20,000 functions from its beginning are used.

    The newest file is kept in memory, since a warm-up draws from it too.

    Raises WorkloadError naming the file, the field and the cure.
    """
    return _read(path, file_state(path))


@lru_cache(maxsize=1)
def _read(path: Path, _state: tuple[int, int]) -> tuple[Corpus, dict[str, Any]]:
    about = about_file(path)
    corpus = Corpus()
    for row in _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path):
        corpus.rows += 1
        _take(corpus, row)
        if len(corpus.functions) >= MOST_FUNCTIONS:
            break
    if not corpus.functions:
        raise WorkloadError(
            "dataset.empty",
            f"{path}: no function of {_LEAST_LINES} lines or more in {corpus.rows} rows; each needs `content` and a "
            f"{' or '.join(_LANGUAGE_KEYS)} that is one of {', '.join(LANGUAGES)}",
        )
    return corpus, {
        **about,
        "dataset": "The Stack",
        "rows_read": corpus.rows,
        "rows_used": corpus.used,
        "subset": f"{len(corpus.functions)} functions of {corpus.used} files in {', '.join(LANGUAGES)}, from the "
        f"file's beginning, at most {MOST_FUNCTIONS}",
        "repositories": len(corpus.repositories),
        "order": "a seeded permutation; a new one when all were sent",
        "preprocessing": f"functions of {_LEAST_LINES} to {_MOST_LINES} lines by keyword and indentation (Python) or "
        "braces; a prompt is a function up to a line drawn evenly from its body; a context is the texts of a "
        "repository put together and cut to the length drawn",
    }


def notes(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes about the rows that are not sent, with the reason. `about` is the description from `read`."""
    if not (unused := about["rows_read"] - about["rows_used"]):
        return ()
    lines = f"{_LEAST_LINES} to {_MOST_LINES} lines in {', '.join(LANGUAGES)}"
    sent = f"{unused} of {about['rows_read']} rows {agree(unused, 'is', 'are')} not sent"
    return (f"{sent}: no function of {lines} is in {agree(unused, 'it', 'them')}",)


def requests(corpus: Corpus, *, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests without end. Output lengths are the draft's log-normal ones, not those of the cut pieces."""
    contexts = _contexts(corpus, stream_rng(seed, _CONTENT_STREAM))
    order = endless_order(len(corpus.functions), seed=seed, stream=_ORDER_STREAM)
    shared, cut, output = (stream_rng(seed, stream) for stream in (_SHARE_STREAM, _CUT_STREAM, _OUTPUT_STREAM))
    while True:
        outputs = whole(CODE_OUTPUT, output, _BLOCK).tolist()
        for prefix, max_tokens in zip(choose(REPOSITORIES, contexts, shared), outputs, strict=True):
            lines = corpus.functions[next(order)].splitlines(keepends=True)
            text = "".join(lines[: 1 + int(cut.integers(len(lines) - 1))])
            yield WorkloadRequest(workload_class=NAME, text=text, max_tokens=max_tokens, prefix=prefix)


def _contexts(corpus: Corpus, rng: np.random.Generator) -> tuple[Shared, ...]:
    """Return ten contexts of 512 to 1024 tokens, chosen by the seed.

    They are of ten repositories if there are as many.
    """
    lengths = whole(REPOSITORIES.tokens, rng, REPOSITORIES.count).tolist()
    names = sorted(corpus.repositories)
    chosen = rng.permutation(len(names)).tolist()
    contexts = []
    for at, tokens in enumerate(lengths):
        texts = corpus.repositories[names[chosen[at % len(names)]]]
        # A repository that serves again begins with another of its texts, so that no two contexts are alike.
        first = at // len(names) % len(texts)
        text = "\n".join([f"# context {at}", *texts[first:], *texts[:first]])[: tokens * _CHARACTERS_A_TOKEN]
        ids = reference().ids(text)
        repeats = -(-tokens // len(ids))
        piece = reference().text((ids * repeats)[:tokens]).rstrip("\ufffd")
        contexts.append(Shared(name=f"repository-{at}", text=piece, tokens=tokens))
    return tuple(contexts)


def _take(corpus: Corpus, row: Mapping[str, Any]) -> None:
    content = row.get("content")
    language = next((str(row[key]) for key in _LANGUAGE_KEYS if row.get(key)), "").lower()
    if not isinstance(content, str) or language not in _LANGUAGES_LOWER:
        return
    functions = list(python_functions(content) if language == "python" else braced_functions(content))
    if not functions:
        return
    corpus.used += 1
    corpus.functions += functions[: MOST_FUNCTIONS - len(corpus.functions)]
    repository = next((str(row[key]) for key in _REPOSITORY_KEYS if row.get(key)), f"file {corpus.used}")
    corpus.repositories.setdefault(repository, []).append(content)


_LANGUAGES_LOWER = frozenset(language.lower() for language in LANGUAGES)


def python_functions(text: str) -> Iterator[str]:
    """Return the functions of Python code: a def and the lines below it that are indented more, or blank."""
    lines = text.splitlines(keepends=True)
    for start, first in enumerate(lines):
        match = _PYTHON.match(first)
        if match is None:
            continue
        end = start + 1
        while end < len(lines) and end - start <= _MOST_LINES and _within(lines[end], len(match[1])):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        if _LEAST_LINES <= end - start <= _MOST_LINES:
            yield "".join(lines[start:end])


def _within(line: str, indent: int) -> bool:
    """Return whether a line belongs to a function, given the indent of its def."""
    stripped = line.lstrip()
    # A closing parenthesis of a long list of parameters stands where the def does.
    return not stripped or len(line) - len(line.lstrip(" \t")) > indent or stripped.startswith(")")


def braced_functions(text: str) -> Iterator[str]:
    """Yield the functions of JavaScript or TypeScript code.

    Each goes from the keyword to the brace that closes the body.

    Braces in texts and comments count too, so a function that has them unpaired is cut wrongly or left out.
    """
    for match in _BRACED.finditer(text):
        depth, lines = 0, 1
        for mark in _MARKS.finditer(text, match.start()):
            lines += mark[0] == "\n"
            depth += (mark[0] == "{") - (mark[0] == "}")
            closed = mark[0] == "}" and depth == 0
            if closed or lines > _MOST_LINES:
                if closed and lines >= _LEAST_LINES:
                    yield text[match.start() : mark.end()]
                break


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa  # noqa: PLC0415  # 100 ms, and few read Parquet
    import pyarrow.parquet as pq  # noqa: PLC0415  # as above

    try:
        with pq.ParquetFile(path) as file:
            wanted = ("content", *_LANGUAGE_KEYS, *_REPOSITORY_KEYS)
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except OSError as error:
        raise unreadable(path, error) from error
    except pa.ArrowException as error:
        raise WorkloadError("dataset.unreadable", f"{path}: no Parquet: {error}; {_CURE}") from error


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        raise WorkloadError(
                            "dataset.unreadable", f"{path}, line {number}: no JSON object: {error}; {_CURE}"
                        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
