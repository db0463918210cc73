"""Mutated input to every parser: nothing is raised but what the parser declares, and nothing takes long or much.

The corpus is `tests/data/faults`, and what other tests have recorded; an input that was once read wrongly is a file
there. Number 0 to n-1 of a parser are the n files of its corpus as they are, every other number is a mutation of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.cases import Case, Kind, Setting, TooLongError, Try, cpu_limit, held_mib, peak_mib
from faults.option_parsers import OPTION_PARSERS
from faults.parsers import PARSERS, Parser

ALL_PARSERS = PARSERS | OPTION_PARSERS
MOST_CPU_S = 0.1  # a 10 kB, and of less
CPU_BYTES = 10_000
MOST_MIB = 100.0
SHOWN_BYTES = 160
# What formats are made of, and what they make trouble with.
TOKENS = [
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"- " * 2000, b"&a [*a]", b"!!python/object/apply:os.system [x]"),
    *(b"9" * 400, b"-1", b"1e999", b"NaN", b"Infinity", b"18446744073709551616", b"9223372036854775807", b".inf"),
    *(b"2023-02-30", b"9999999999999999-01-01", b"0023-01-01 00:00:00", b"1:2:3", b"0x", b"0b", b"1_000"),
    *(b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\\ud800", b"\r", b"\n"),
    *(b'"', b"'", b"\\", b",", b":", b";", b"{}", b"[]", b"null", b"true", b"{", b"}", b"]", b"#", b"=", b" ", b"\t"),
    *(b"data: ", b"event: ", b"[DONE]", b"usage", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-5\r\n", b"5;a=b\r\n"),
    *(b"# TYPE ", b"# EOF\n", b"_bucket", b"_total", b'le="', b'{le="+Inf"}', b'# {a="b"} 1'),
    *(b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x00" * 500, b"\x80" * 20, b"\x1f\x8b\x08\x00", b"\xf5SLr", b"\xf5SLe"),
]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change an input in one to six places: bytes, tokens, cuts, repetitions."""
    new = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(new) + 1)
        match rng.randrange(8):
            case 0:
                new[at:at] = rng.choice(TOKENS)
            case 1:
                new[at : at + rng.randrange(1, 20)] = rng.choice(TOKENS)
            case 2:
                del new[at : at + rng.randrange(1, 30)]
            case 3:
                del new[at:]
            case 4:
                begin = rng.randrange(len(new) + 1)
                new[at:at] = new[begin : begin + rng.randrange(1, 500)]
            case 5:
                new[at:at] = rng.randbytes(rng.randrange(1, 8))
            case _ if new:
                new[at % len(new)] ^= 1 << rng.randrange(8)
    return bytes(new)


def read(parser: Parser, data: bytes, rng: random.Random, place: Path) -> str:
    """Let a parser read an input, and return what is wrong."""
    before_mib, most_mib = held_mib(), peak_mib()
    try:
        with cpu_limit(MOST_CPU_S * max(1.0, len(data) / CPU_BYTES)):
            parser.read(data, rng, place)
    except parser.declared:
        pass
    except (Exception, TooLongError) as error:  # noqa: BLE001  that is what is looked for
        return f"{type(error).__name__}: {error}; {len(data)} bytes, {data[:SHOWN_BYTES]!r}"
    growth_mib = peak_mib() - before_mib if peak_mib() > most_mib else 0.0
    return f"{growth_mib:.0f} MiB for {len(data)} bytes" if growth_mib > MOST_MIB else ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    corpora = {name: parser.corpus() for name, parser in ALL_PARSERS.items()}

    def attempt(case: Case) -> str:
        parser, corpus, rng = ALL_PARSERS[case.row], corpora[case.row], case.random()
        data = corpus[case.number] if case.number < len(corpus) else mutated(rng.choice(corpus), rng)
        state = rng.getstate()
        wrong = read(parser, data, rng, setting.place)
        if wrong.startswith(TooLongError.__name__):
            rng.setstate(state)  # once more: what is done a first time, such as an import, may take long
            wrong = read(parser, data, rng, setting.place)
        return wrong

    yield attempt


FUZZ = Kind(name="fuzz", rows=dict.fromkeys(ALL_PARSERS, 100), opened=opened)
