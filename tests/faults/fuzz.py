"""Mutated input to every parser: nothing is raised but what the parser declares, and nothing takes long or much.

The corpus is `tests/data/faults`, and what other tests have recorded; an input that was once read wrongly is a file
there. Number 0 to n-1 of a parser are the n files of its corpus as they are, every other number is a mutation of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from faults.cases import Case, Kind, Setting, TooLongError, Try, cpu_limit, peak_mib
from faults.parsers import PARSERS

MOST_CPU_S = 1.0
MOST_GROWTH_MIB = 100.0
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


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    corpora = {name: parser.corpus() for name, parser in PARSERS.items()}

    def attempt(case: Case) -> str:
        parser, corpus, rng = PARSERS[case.row], corpora[case.row], case.random()
        data = corpus[case.number] if case.number < len(corpus) else mutated(rng.choice(corpus), rng)
        before_mib = peak_mib()
        try:
            with cpu_limit(MOST_CPU_S):
                parser.read(data, rng, setting.place)
        except parser.declared:
            pass
        except (Exception, TooLongError) as error:  # noqa: BLE001  that is what is looked for
            return f"{type(error).__name__}: {error}; {len(data)} bytes, {data[:SHOWN_BYTES]!r}"
        growth_mib = peak_mib() - before_mib
        return f"{growth_mib:.0f} MiB for {len(data)} bytes" if growth_mib > MOST_GROWTH_MIB else ""

    yield attempt


FUZZ = Kind(name="fuzz", rows=dict.fromkeys(PARSERS, 200), opened=opened)
