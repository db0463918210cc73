"""The body of a page: compressed or not, whole or not, and never more of it in memory than is allowed."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat

import pytest
from served import Serve, answer

from sidelight.rundir.access import Access
from sidelight.scraper.targets.fetch import LIMITS, FetchLimits, _headers, open_session, scrape
from sidelight.scraper.targets.scrape import Scrape

MIB = 1024 * 1024
PAGE = b"# TYPE x gauge\nx 1\n"


async def once(url: str, limits: FetchLimits = LIMITS) -> Scrape:
    async with open_session() as session:
        return await scrape(session, url, tick_ns=0, clock_offset_ns=0, limits=limits)


@pytest.mark.parametrize(
    ("body", "encoding", "page", "error"),
    [
        (gzip.compress(PAGE, mtime=0), "gzip", PAGE, ""),
        (gzip.compress(PAGE, mtime=0), "X-GZIP", PAGE, ""),
        (PAGE, "identity", PAGE, ""),
        (b"", "gzip", b"", ""),
        (gzip.compress(PAGE, mtime=0)[:-5], "gzip", b"", "cut off: the compressed page is not whole"),
        (PAGE, "gzip", b"", "encoding: declared as gzip, but is not"),
        (zlib.compress(PAGE), "deflate", b"", "encoding: 'deflate', which was not asked for"),
    ],
)
async def test_compressed_pages(serve: Serve, body: bytes, encoding: str, page: bytes, error: str):
    """What was asked for is unpacked, anything else is a reason."""
    scraped = await once(await serve({"/metrics": answer(body, **{"Content-Encoding": encoding})}) + "/metrics")
    assert (page, error) == (scraped.body, scraped.error)


@pytest.mark.parametrize(
    ("url", "encoding"),
    [
        ("http://127.0.0.1:8000/metrics", "identity"),
        ("http://localhost/metrics", "identity"),
        ("http://[::1]:8000/metrics", "identity"),
        ("https://10.0.0.7/metrics", "gzip"),
        ("http://user:pass@engine/metrics", "gzip"),
    ],
)
def test_only_what_travels_is_compressed(url: str, encoding: str):
    """On its own machine the engine is spared the work."""
    assert encoding == _headers(url, Access())["Accept-Encoding"]


def zeros_compressed() -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    for _ in range(200):
        yield packer.compress(bytes(MIB))
    yield packer.flush()


def letters() -> Iterator[bytes]:
    return repeat(b"x 1\n" * (MIB // 4), 200)


@asynccontextmanager
async def sending(head: bytes, parts: Iterable[bytes]) -> AsyncIterator[str]:
    """Serve one reply whatever is asked, as long as somebody reads it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n" + head + b"\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"


@pytest.mark.parametrize(
    ("head", "parts"),
    [
        (b"Content-Encoding: gzip\r\n", zeros_compressed),
        (b"", letters),
        (b"Content-Length: %d\r\n" % (200 * MIB), letters),
    ],
    ids=["a bomb of gzip", "a plain page", "a plain page that says so"],
)
async def test_two_hundred_megabytes(head: bytes, parts: Callable[[], Iterator[bytes]]):
    """A page beyond the limit is refused, and costs no more memory than the limit and a few reads."""
    async with sending(head, list(parts())) as url:
        await once(url, FetchLimits(body_bytes=1))  # what is loaded once is not the page's cost
        tracemalloc.start()
        scraped = await once(url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (f"too large: more than {16 * MIB} bytes", b"") == (scraped.error, scraped.body)
    assert peak < 40 * MIB
