from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import TYPE_CHECKING

import pytest
from msgspec import to_builtins
from waiting import BOUND_S

from sidelight.loadgen.host.round_trip import Rtt, measure_rtt, round_trip
from sidelight.rundir.stats import Missing

if TYPE_CHECKING:
    from conftest import Peer, Serve


async def _idle(peer: Peer) -> None:
    await peer.say()


async def test_handshakes_with_a_server_are_timed(serve: Serve):
    """Five, each a connection; no request is sent."""
    server = await serve(_idle)
    got = await measure_rtt(server.url + "/v1")
    assert isinstance(got, Rtt)
    assert (5, []) == (len(got.connect_ms), server.peers)
    block = round_trip("http://h", got)
    assert 0 < block.min <= block.median <= block.max
    assert block.own_address is True
    if sys.platform == "linux":
        assert isinstance(got.kernel_ms, tuple)
    json.dumps(to_builtins(block), allow_nan=False)


async def test_a_kernel_answers_for_a_process_that_does_not():
    """A server that accepts nothing still completes handshakes: the process is not part of a round trip."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        got = await measure_rtt(f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert isinstance(got, Rtt)


async def test_a_second_address_is_tried(serve: Serve):
    """localhost may be ::1 first, where nothing listens."""
    server = await serve(_idle)
    got = await measure_rtt(server.url.replace("127.0.0.1", "localhost"))
    assert isinstance(got, Rtt)


async def test_a_closed_port_is_a_reason():
    """In the system's words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        got = await measure_rtt(f"http://127.0.0.1:{port}")
    assert isinstance(got, Missing)
    assert got.reason.startswith(f"127.0.0.1:{port}: ")
    block = round_trip("http://h", got)
    assert (0, None, got.reason) == (block.handshakes, block.median, block.missing)


async def test_a_host_that_does_not_answer_costs_no_more_than_the_deadline():
    """A listener whose queue is full drops what comes: the reason is the deadline."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        port = listening.getsockname()[1]
        waiting = []
        try:
            for _ in range(8):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                waiting.append(client)
            got = await asyncio.wait_for(measure_rtt(f"http://127.0.0.1:{port}", timeout_s=0.2), BOUND_S)
        finally:
            for client in waiting:
                client.close()
    assert isinstance(got, Missing)
    assert f"no connection to 127.0.0.1:{port} within 0.2 s" == got.reason


async def test_a_url_without_a_host_is_refused():
    """With the cure."""
    with pytest.raises(ValueError, match="names no host; write http://host:port"):
        await measure_rtt("localhost:8000")
