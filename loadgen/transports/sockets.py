"""Sources of a connection's bytes: a plain socket or a stream under TLS.

The plain socket is read with the kernel's stamps.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from typing import cast

from sidelight.loadgen.transports.connection import Connection
from sidelight.loadgen.transports.lateness import NO_STAMP, TIMESPEC, ReceiveStamps
from sidelight.rundir.clock import AnchoredClock

# More would give many events one stamp.
_READ_BYTES = 32_768
# In one look: a peer that sends faster than we read must not hold up the rest.
_LOOK_READS = 64
# Under TLS uvloop reads 256 KiB at a time, and up to 32 times in one turn where as much is there: with less room in the
# kernel it is not.
_TLS_RECEIVE_BUFFER_BYTES = 65_536
# Linux: ask for the time a segment came in (as struct timespec). Python has no name for it; the value is the one of all
# architectures but parisc and sparc, where asking fails or is answered by nothing.
_SO_TIMESTAMPNS = 35
_CONTROL_BYTES = socket.CMSG_SPACE(TIMESPEC.size)

Address = tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]


class SocketWire:
    """A non-blocking TCP socket, read by recvmsg as soon as bytes arrive; owns the socket.

    Each read comes with the moment it returned and the kernel's stamp, of the last segment in it, where there is one.
    """

    __slots__ = ("_connection", "_loop", "_monotonic_ns", "_offset_ns", "_received", "_recvmsg", "_rest", "_socket")

    def __init__(self, connection: Connection, sock: socket.socket, clock: AnchoredClock) -> None:
        self._connection = connection
        self._received = connection.received
        self._socket = sock
        self._recvmsg = sock.recvmsg
        # Clock.now_ns, taken apart: a call a read.
        self._monotonic_ns, self._offset_ns = clock.monotonic_ns, clock.offset_ns
        self._loop = asyncio.get_running_loop()
        self._rest = memoryview(b"")
        self._loop.add_reader(sock, self._readable)

    @property
    def unsent(self) -> bool:
        return bool(self._rest)

    def send(self, data: bytes) -> None:
        self._rest = memoryview(data)
        self._push()
        if self._rest:
            self._loop.add_writer(self._socket, self._writable)

    def look(self) -> None:
        # Where the peer has reset the connection, uvloop calls a reader once, whatever there is to read, and watches
        # the socket no longer: a reset right behind a read would go unnoticed.
        for _ in range(_LOOK_READS):
            if self._socket.fileno() < 0 or not self._readable():
                return

    def abort(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._rest = memoryview(b"")

    def _push(self) -> None:
        # Before the call: a peer on this very machine can be woken by it, and run in our place until it has answered.
        at_ns = self._monotonic_ns() + self._offset_ns
        try:
            self._rest = self._rest[self._socket.send(self._rest) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._rest = memoryview(b"")
            # Not from within begin(), whose caller has yet to wait.
            self._loop.call_soon(self._connection.lost, error)
            return
        if not self._rest:
            self._connection.sent(at_ns)

    def _writable(self) -> None:
        self._push()
        if not self._rest and self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> bool:
        """Read once, and return whether there may be more."""
        try:
            data, control, _, _ = self._recvmsg(_READ_BYTES, _CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._connection.lost(error)
            return False
        if not data:
            self._connection.ended_by_peer()
            return False
        stamp = control[0][2] if control else NO_STAMP
        self._received(data, self._monotonic_ns() + self._offset_ns, stamp)
        return True


class StreamWire(asyncio.Protocol):
    """A transport of the event loop's, for TLS; reads are stamped when it hands them over."""

    __slots__ = ("_clock", "_connection", "_transport")

    def __init__(self, connection: Connection, clock: AnchoredClock) -> None:
        self._connection = connection
        self._clock = clock
        self._transport: asyncio.Transport | None = None

    @property
    def unsent(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if not self.unsent:
                self._connection.sent(self._clock.now_ns())

    def abort(self) -> None:
        """Close the transport; it closes its socket in the loop's next turn."""
        if self._transport is not None:
            self._transport.abort()

    def look(self) -> None:
        """Do nothing: the transport reports all reads itself."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: uvloop's transports are asyncio.Transports in all but name.
        self._transport = cast("asyncio.Transport", transport)
        # Every unsent byte pauses writing, so resume_writing tells when the last one has left.
        self._transport.set_write_buffer_limits(high=0)

    def resume_writing(self) -> None:
        self._connection.sent(self._clock.now_ns())

    def data_received(self, data: bytes) -> None:
        self._connection.received(data, self._clock.now_ns(), NO_STAMP)

    def eof_received(self) -> None:
        # Returning None lets the transport close itself; connection_lost follows.
        self._connection.ended_by_peer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost(exc)


async def connect(address: Address, clock: AnchoredClock, stamps: ReceiveStamps) -> Connection:
    """Connect by plain TCP. Raises OSError."""
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            _ask_for_stamps(sock)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    connection = Connection(clock, stamps)
    connection.take_wire(SocketWire(connection, sock, clock))
    return connection


async def connect_tls(
    address: Address, clock: AnchoredClock, stamps: ReceiveStamps, *, tls: ssl.SSLContext, host: str
) -> Connection:
    """Connect and shake hands with `host`. Raises OSError."""
    connection = Connection(clock, stamps)
    (family, where), loop = address, asyncio.get_running_loop()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TLS_RECEIVE_BUFFER_BYTES)
        await loop.sock_connect(sock, where)
        _, wire = await loop.create_connection(
            lambda: StreamWire(connection, clock), sock=sock, ssl=tls, server_hostname=host
        )
    except BaseException:
        sock.close()
        raise
    connection.take_wire(wire)
    return connection


def _ask_for_stamps(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        # A kernel that has none, as gVisor's: reads are then stamped by us, and WorkerStat says so.
        return
