"""A TCP proxy that holds back what a client sends, each piece by the same time: a known delay on the way to a server.

python delay.py HOST:PORT MS    It listens on a free port of the loopback, prints it, and runs until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

PIECE_BYTES = 65536


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hold_s: float) -> None:
    """Write what is read, in its order, each piece `hold_s` after it came."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        piece = b"."
        while piece:
            try:
                piece = await reader.read(PIECE_BYTES)
            except ConnectionError:
                piece = b""
            pieces.put_nowait((loop.time() + hold_s, piece))

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        with suppress(ConnectionError):
            while (timed := await pieces.get())[1]:
                await asyncio.sleep(timed[0] - loop.time())
                writer.write(timed[1])
                await writer.drain()
        writer.close()


async def serve(server: str, hold_s: float) -> None:
    """Stand before a server, HOST:PORT."""
    host, _, port = server.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(reader, inner_writer, hold_s))
            group.create_task(pass_on(inner_reader, writer, 0.0))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]) / 1e3))
