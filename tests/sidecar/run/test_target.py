"""What a target is asked before any load, against servers that write bytes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from codes import raises
from waiting import BOUND_S, movable_time

from sidelight.loadgen.plan.tokenizers.server import probe_server
from sidelight.recorded.errors import TargetIncompatible
from sidelight.sidecar.run.preparation.preflight import PREFLIGHT_TIMEOUT_S, SOON_S, preflight
from sidelight.sidecar.run.preparation.target import Contact, TargetInfo, probe, proxy_note, unlisted_note

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":"length"}]}\n\n'
    b'data: {"type":"response.output_text.delta","delta":"w"}\n\ndata: [DONE]\n\n'  # of `responses`
)


@asynccontextmanager
async def answering(
    reply: bytes, sent: asyncio.Event | None = None, *, close: bool = False
) -> AsyncIterator[TargetInfo]:
    """Run a server that answers its first request with these bytes, and keeps the connection unless it shall close."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        if sent is not None:
            sent.set()
        if not close:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield TargetInfo(url=f"http://127.0.0.1:{port}", model="m", max_model_len=None)
        over.set()


@asynccontextmanager
async def refusing(
    *fields: str, status: int = 400, why: str = "Unrecognized request argument supplied: {}", echo: bool = False
):
    """Serve whatever is asked, but refuse bodies with one of the fields; yield the server and the bodies that came."""
    bodies: list[dict[str, Any]] = []

    async def serve(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        for field in fields:
            if field in body:
                error = {"error": {"message": why.format(field)}, **({"request": body} if echo else {})}
                return web.json_response(error, status=status)
        return web.Response(body=EVENTS, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/{path:.*}", serve)
    async with TestServer(app) as server:
        yield TargetInfo(url=f"http://127.0.0.1:{server.port}", model="m", max_model_len=None), bodies


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", ("ignore_eos",)),
        ("completions", ("ignore_eos",)),
        ("chat", ("stream_options",)),
        ("completions", ("ignore_eos", "stream_options")),
        ("responses", ("store", "ignore_eos")),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("echo", [False, True])
async def test_a_field_that_a_server_refuses_is_left_out(
    endpoint: str, fields: tuple[str, ...], status: int, echo: bool
):
    """Each by its name in the server's message, also where the body repeats the whole request; nothing else goes."""
    async with refusing(*fields, status=status, echo=echo) as (served, bodies):
        refused = await preflight(served, contact=Contact(endpoint=endpoint), ignore_eos=True)
    assert set(fields) == set(refused)
    assert all(f"supplied: {field}" in said for field, said in refused.items())
    assert set(fields) == bodies[0].keys() - bodies[-1].keys()
    assert 1 + len(fields) == len(bodies)


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("Extra inputs are not permitted", "; where it does not know ignore_eos, add --no-ignore-eos"),
        ("unknown parameter", "; where it does not know ignore_eos, add --no-ignore-eos"),
        ("temperature must be non-negative, got -1", ""),
    ],
)
async def test_a_refusal_has_a_cure_where_it_is_about_an_unknown_field(why: str, cure: str):
    """The server's own words in any case; a field that the user gave is not taken away."""
    async with refusing("ignore_eos", why=why) as (served, bodies):
        with pytest.raises(TargetIncompatible, match=f"one token: {why}{cure}$"):
            await preflight(served, contact=Contact(), ignore_eos=True)
    assert 1 == len(bodies)
    async with refusing("stream_options") as (served, bodies):
        with raises("target.refused", says="stream_options"):
            await preflight(served, contact=Contact(extra={"stream_options": {}}))


@pytest.mark.parametrize(
    ("status", "cure"), [(401, "set SIDELIGHT_API_KEY"), (404, "offer --endpoint completions: choose one")]
)
async def test_the_cure_of_a_status(status: int, cure: str):
    """What a request for one token is refused with says what to change."""
    async with refusing("model", status=status) as (served, _):
        with pytest.raises(TargetIncompatible, match=f"HTTP {status} to a request for one token: .*{cure}"):
            await preflight(served, contact=Contact(endpoint="completions"))


async def test_a_model_that_the_server_does_not_know_is_the_users_to_choose():
    """sglang-router lists `unknown` before it has asked its engines, and answers 404 for that."""
    async with refusing("model", status=404, why="The {} `m` does not exist. Valid aliases: a.") as (served, _):
        with raises("target.refused", says="Valid aliases: a"):
            await preflight(served, contact=Contact())


@pytest.mark.parametrize(("extra", "tokens"), [({"min_tokens": 5}, 16), ({"min_tokens": 40}, 40), ({}, 16)])
async def test_a_server_that_refuses_one_token_is_asked_for_more(extra: dict[str, object], tokens: int):
    """As vllm beside min_tokens, and OpenAI's Responses, which generate at least 16; as many as the body asks for."""
    bodies: list[dict[str, Any]] = []

    async def serve(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if bodies[-1]["max_tokens"] < (least := bodies[-1].get("min_tokens", 16)):
            message = f"min_tokens must be less than or equal to max_tokens={bodies[-1]['max_tokens']}, got {least}."
            return web.json_response({"error": {"message": message}}, status=400)
        return web.Response(body=EVENTS, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/{path:.*}", serve)
    async with TestServer(app) as server:
        served = TargetInfo(url=f"http://127.0.0.1:{server.port}", model="m", max_model_len=None)
        assert {} == await preflight(served, contact=Contact(extra=extra), ignore_eos=True)
    assert [1, tokens] == [body["max_tokens"] for body in bodies]


def _listing(*names: str) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": name, "max_model_len": 64} for name in names]})


@asynccontextmanager
async def listing(models: web.Response, known: str = "wanted"):
    """Serve a list of models, and completions of one model, listed or not; yield the URL."""

    async def complete(request: web.Request) -> web.Response:
        if (await request.json())["model"] != known:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return web.Response(body=EVENTS, content_type="text/event-stream")

    async def answer(_: web.Request) -> web.Response:
        return models

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    app.router.add_post("/v1/chat/completions", complete)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_a_server_without_models_is_given_a_cure():
    """What to do is said."""
    async with listing(_listing()) as url:
        with raises("model.missing"):
            await probe(url, model=None, contact=Contact())


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (partial(_listing, "unknown"), "serves: unknown"),
        (_listing, "serves: none"),
        (partial(web.Response, status=500), "HTTP 500"),
        (partial(web.Response, status=401), "HTTP 401"),
        (partial(web.Response, text="<!doctype html>", content_type="text/html"), "not JSON but text/html"),
        (partial(web.json_response, {"hello": "world"}), "not a list of models"),
    ],
)
async def test_a_model_that_is_named_need_not_be_listed(models: Callable[[], web.Response], why: str):
    """As behind gateways: it is used where a request for it is answered, with a note."""
    async with listing(models()) as url:
        served = await probe(url, model="wanted", contact=Contact())
        assert {} == await preflight(served, contact=Contact())
        note = unlisted_note(served)
    assert ("wanted", None) == (served.model, served.max_model_len)
    assert note is not None
    assert ("is not in the server's list of models" in note) == why.startswith("serves")
    assert f"({url}/v1/models" in note
    assert why in note


async def test_a_model_that_is_neither_listed_nor_answered_is_the_users_mistake():
    """The line says what is served, and what became of the request; where no list was read, both failures."""
    async with listing(_listing("llama", "qwen")) as url:
        served = await probe(url, model="gpt-9", contact=Contact())
        with raises("model.not-served", says="llama, qwen"):
            await preflight(served, contact=Contact())
    async with listing(web.Response(status=500)) as url:
        served = await probe(url, model="gpt-9", contact=Contact())
        with raises("target.server-error"):
            await preflight(served, contact=Contact())


async def test_a_model_that_is_listed_is_used_without_a_note():
    async with listing(_listing("wanted", "other")) as url:
        served = await probe(url, model="wanted", contact=Contact())
    assert (64, None) == (served.max_model_len, unlisted_note(served))


async def test_several_models_are_all_to_be_listed():
    """The first is asked before the load; another that is not served is a mistake."""
    async with listing(_listing("base", "a", "b")) as url:
        served = await probe(url, model="base, a,b", contact=Contact())
    assert ("base", ("a", "b")) == (served.model, served.others)
    async with listing(_listing("base", "a", "b")) as url:
        with raises("model.not-served"):
            await probe(url, model="base,c", contact=Contact())


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
async def test_bytes_after_the_end_of_a_reply_are_ignored(newline: bytes):
    """The reply ends where its framing says, in whatever newlines; the server did not close, and need not."""
    framed = b"%x" % len(EVENTS) + newline + EVENTS + newline + b"0" + newline + newline
    async with answering(HEAD + framed + b"and more") as served, asyncio.timeout(BOUND_S):
        await preflight(served, contact=Contact())


async def test_who_waits_for_the_first_token_is_warned(monkeypatch: pytest.MonkeyPatch):
    """With what is waited for, and until when; not while the token may still come soon."""
    sent, said, lines = asyncio.Event(), asyncio.Event(), []
    move = movable_time(monkeypatch)

    def say(text: str) -> None:
        lines.append(text)
        said.set()

    async with answering(b"", sent) as served, asyncio.timeout(BOUND_S):
        asked = asyncio.ensure_future(preflight(served, contact=Contact(), say=say))
        await sent.wait()
        assert [] == lines
        move(SOON_S)
        await said.wait()
        asked.cancel()
    assert [f"waiting for a token of {served.url}, up to 120 s: a first request may compile kernels"] == lines


RESET = "the server, or something before it, resets connections in the middle of replies"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (HEAD + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", "failed: empty: the stream ended without any output"),
        (HEAD + b"0\r\n\r\n", "failed: empty: the stream ended without any output"),
        (HEAD + b"6\r\n: ping\r\n0\r\n\r\n", "failed: the reply ended without a finish reason or [DONE]: "),
        (
            HEAD + b"%x\r\n" % len(EVENTS) + EVENTS[:99],
            f"failed: reset: closed by the peer after 103 body bytes; {RESET}",
        ),
    ],
    ids=["only [DONE]", "nothing", "a comment", "reset"],
)
async def test_a_reply_that_is_none_is_said_to_be_so(reply: bytes, said: str):
    """What is true of it, in words: no count of bytes stands for a reason."""
    async with answering(reply, close=True) as served:
        with raises("target.failed") as refused:
            await preflight(served, contact=Contact())
    assert said in str(refused.value)


@pytest.mark.parametrize(("status", "cure"), [(429, "(--rate)"), (500, "own log"), (503, "own log")])
async def test_a_server_that_limits_or_fails_gets_advice(status: int, cure: str):
    """Its words stand before it, with when it wants to be asked again."""
    head = b"HTTP/1.1 %d X\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy" % status
    async with answering(head) as served:
        with raises("target.refused") as refused:
            await preflight(served, contact=Contact())
    assert f"HTTP {status} to a request for one token: busy (Retry-After: 7); " in str(refused.value)
    assert cure in str(refused.value)


async def test_a_reply_that_was_asked_for_whole_need_not_be_a_stream():
    """With "stream": false among the further fields JSON is what was asked for."""
    body = b'{"choices":[{"message":{"content":"w"},"finish_reason":"length"}]}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with answering(reply) as served:
        assert {} == await preflight(served, contact=Contact(extra={"stream": False}))
    async with answering(reply) as served:
        with raises("target.not-streaming"):
            await preflight(served, contact=Contact())


async def test_a_reply_that_is_done_and_does_not_end(monkeypatch: pytest.MonkeyPatch):
    """Each request would last until it is given up, so no load is sent."""
    move, sent = movable_time(monkeypatch), asyncio.Event()
    async with answering(HEAD + b"%x\r\n%b\r\n" % (len(EVENTS), EVENTS), sent) as served:
        asking = asyncio.create_task(preflight(served, contact=Contact()))
        await asyncio.wait_for(sent.wait(), BOUND_S)
        for _ in range(10):  # turns of the loop, in which what was sent is read
            await asyncio.sleep(0)
        move(PREFLIGHT_TIMEOUT_S)
        with raises("target.no-token"):
            await asking


@pytest.mark.parametrize(
    ("environment", "url", "name"),
    [
        ({"HTTPS_PROXY": "http://p:3128"}, "https://api.example.com/v1", "HTTPS_PROXY"),
        ({"http_proxy": "http://p:3128"}, "http://engine:8000", "http_proxy"),
        ({"ALL_PROXY": "socks5://p"}, "http://engine:8000", "ALL_PROXY"),
        ({"HTTPS_PROXY": "http://p:3128"}, "http://engine:8000", None),
        ({"HTTP_PROXY": "http://p:3128", "NO_PROXY": "engine,other"}, "http://engine:8000", None),
        ({"HTTP_PROXY": "http://p:3128"}, "http://127.0.0.1:8000", None),
        ({"HTTP_PROXY": "http://p:3128"}, "http://[::1]:8000", None),
        ({"HTTP_PROXY": ""}, "http://engine:8000", None),
    ],
)
async def test_a_proxy_that_is_not_used_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, name: str | None
):
    """Where it applies to the target; and again where the target cannot be reached without it. Never its address."""
    for scheme in ("http", "https", "all", "no"):
        for key in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    note = proxy_note([url])
    assert (name and f"{name} is set, but Sidelight does not use it: requests go straight to {url}") == note


async def test_a_target_behind_a_proxy_cannot_be_reached(monkeypatch: pytest.MonkeyPatch):
    """The line says that the proxy was not asked."""
    monkeypatch.setenv("HTTP_PROXY", "http://user:geheim@127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with raises("target.unreachable") as caught:
        await probe("http://no-such-host.invalid:8000", model=None, contact=Contact())
    assert str(caught.value).endswith(
        "HTTP_PROXY is not used: Sidelight connects directly, so run it where the target can be reached"
    )


@pytest.mark.parametrize("status", [302, 307])
async def test_a_redirect_to_another_host_gets_no_header(status: int):
    """Of the other port of a host neither, which may be another user's; on the same one a redirect is followed."""
    came: list[str] = []

    async def other(request: web.Request) -> web.Response:
        came.append(request.headers["X-Api-Key"])
        return web.json_response({"data": [{"id": "m"}]})

    elsewhere = web.Application()
    elsewhere.router.add_get("/{any:.*}", other)
    async with TestServer(elsewhere) as away:

        async def lead(request: web.Request) -> web.Response:
            place = "/list" if request.path == "/here/v1/models" else str(away.make_url("/v1/models"))
            return web.Response(status=status, headers={"Location": place})

        leading = web.Application()
        leading.router.add_get("/list", other)
        leading.router.add_route("*", "/{any:.*}", lead)
        async with TestServer(leading) as server:
            contact = Contact(headers={"X-Api-Key": "secret"})
            assert "m" == (await probe(str(server.make_url("/here")), model=None, contact=contact)).model
            assert ["secret"] == came
            with raises("target.redirected"):
                await probe(str(server.make_url("/away")), model=None, contact=contact)
            tokenizer = await probe_server(str(server.make_url("/away")), "m", contact.headers)
            assert "redirect to another host" in str(tokenizer)
    assert ["secret"] == came
