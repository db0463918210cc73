"""Which engine a request was sent to, by the addresses of the request and of the scraped pages."""

from __future__ import annotations

import numpy as np
import pytest

from sidelight.correlator.requests import address, route


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000/metrics", ("host", 8000)),
        ("http://user:secret@host:8000/v1", ("host", 8000)),
        ("http://***@host:8000/v1", ("host", 8000)),
        ("HTTP://Host:80", ("host", 80)),
        ("http://host/", ("host", 80)),
        ("https://HOST/v1", ("host", 443)),
        ("wss://host/v1", ("host", 443)),
        ("ws://host/v1", ("host", 80)),
        ("http://[::1]:8000/v1", ("::1", 8000)),
        ("", ("", 0)),
        ("http://", ("", 0)),
        ("http://host:port/", ("", 0)),
        ("http://[broken/", ("", 0)),
    ],
)
def test_an_address_is_host_and_port(url: str, expected: tuple[str, int]):
    assert expected == address(url)


@pytest.mark.parametrize(
    ("asked", "engines", "usable", "expected"),
    [
        (["http://a:1/v1", "http://b:1/v1"], ["http://a:1/m", "http://b:1/m"], None, [([0], [0]), ([1], [1])]),
        (["http://a:1/v1", "http://b:1/v1"], ["http://***@a:1/m", "http://***@b:1/m"], None, [([0], [0]), ([1], [1])]),
        (["HTTP://A:80", "http://b"], ["http://a/m", "http://B:80/m"], None, [([0], [0]), ([1], [1])]),
        (["http://a:1", "http://c:1"], ["http://a:1", "http://b:1"], None, [([0], [0]), ([], [1])]),
        (["http://gateway", "http://gateway"], ["http://a:1", "http://b:1"], None, [([0, 1], [0, 1])]),
        (["http://a:1", "http://a:1"], ["http://a:1/x", "http://a:1/y"], None, [([0, 1], [0, 1])]),
        (["http://a:1", "http://a:1"], ["http://a:1", "http://b:1"], [False, True], [([0, 1], [0, 1])]),
        (["", ""], ["http://a:1"], None, [([0, 1], [0])]),
        ([], ["http://a:1"], None, [([], [0])]),
        (["http://a:1"], [], None, [([0], [])]),
    ],
    ids=[
        "each its own engine",
        "user and password are no part of an address",
        "nor are case and the port of the scheme",
        "a server without a page has no group",
        "behind a gateway",
        "two pages at one address",
        "a router that is scraped",
        "no address",
        "no requests",
        "no engines",
    ],
)
def test_requests_are_divided_by_engine(
    asked: list[str], engines: list[str], usable: list[bool] | None, expected: list[tuple[list[int], list[int]]]
):
    groups = route(np.array(asked, dtype=np.object_), engines, None if usable is None else np.array(usable))

    assert expected == [(rows.tolist(), members) for rows, members in groups]
