"""Servers that answer one request a connection with given bytes, over TLS too, and know when each request came."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

# Where one of these stands among the pieces of an answer: the end is a reset; nothing comes until the client leaves;
# what follows is written until then; a twentieth of a second passes.
RESET, HANG, AGAIN, PAUSE = b"<reset>", b"<hang>", b"<again>", b"<pause>"
PAUSE_S = 0.05
AGAIN_S = 0.002  # without end, but not as fast as can be: that would be another test
_SO_TIMESTAMPNS = 35
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request; `arrived_ns` is when its last bytes came, by the kernel's stamp where it gives one."""

    path: str
    head: bytes
    body: bytes
    arrived_ns: int


Answer = Callable[[Asked], Sequence[bytes]]
Noted = Callable[[Asked, int, int], None]  # with the times right before and right behind the first bytes of the answer


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """Return what came, and when."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv(65536), time.time_ns()
    data, ancillary, *_ = connection.recvmsg(65536, 64)
    stamps = [struct.unpack("qq", raw[:16]) for _, kind, raw in ancillary if kind == _SO_TIMESTAMPNS]
    return data, stamps[-1][0] * 10**9 + stamps[-1][1] if stamps else time.time_ns()


def _read(connection: socket.socket) -> Asked | None:
    """Return a request; None where the client left."""
    data, length, arrived_ns = b"", -1, 0
    while length < 0 or len(data) < length:
        piece, arrived_ns = _receive(connection)
        if not piece:
            return None
        data += piece
        if length < 0 and (end := data.find(b"\r\n\r\n")) >= 0:
            stated = _LENGTH.search(data, 0, end + 2)
            length = end + 4 + (int(stated[1]) if stated else 0)
    head, _, body = data.partition(b"\r\n\r\n")
    return Asked(path=head.split(b" ")[1].decode(), head=head, body=body, arrived_ns=arrived_ns)


def _write(connection: socket.socket, pieces: Sequence[bytes]) -> tuple[int, int]:
    """Return when the first bytes went: right before, and right behind."""
    repeats, sent_ns = False, (0, 0)
    for piece in pieces:
        if piece == AGAIN:
            repeats = True
        elif piece == RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif piece == HANG:
            connection.recv(1)
        elif piece == PAUSE:
            time.sleep(PAUSE_S)
        else:
            before_ns = time.time_ns()
            connection.sendall(piece)
            sent_ns = sent_ns if sent_ns[0] else (before_ns, time.time_ns())
            while repeats:
                connection.sendall(piece)
                time.sleep(AGAIN_S)
    return sent_ns


@contextmanager
def serving(answer: Answer, *, tls: ssl.SSLContext | None = None, noted: Noted | None = None) -> Iterator[str]:
    """Answer one request a connection with what `answer` gives for it, and give the URL."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection if tls is None else tls.wrap_socket(connection, server_side=True) as stream:
            asked = _read(stream)
            if asked is not None:
                sent_ns = _write(stream, answer(asked))
                if noted is not None:
                    noted(asked, *sent_ns)

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        with suppress(OSError):  # a kernel that has none
            listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http{'s' * (tls is not None)}://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
