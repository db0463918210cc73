"""Real servers on loopback that say exactly what a test scripts, and the pieces of a reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from certificates import Authority
from children import piped
from waiting import BOUND_S

from sidelight.loadgen import records
from sidelight.loadgen.plan import tokenizers
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir import clock, frames

PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Peer:
    """One request as the server saw it, and the way back."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: int
    head: bytes
    body: bytes

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    def header(self, name: str) -> str | None:
        for line in self.head.decode().split("\r\n"):
            key, _, value = line.partition(": ")
            if key.lower() == name.lower():
                return value
        return None


Script = Callable[[Peer], Awaitable[None]]


@dataclass(slots=True)
class Server:
    url: str
    peers: list[Peer] = field(default_factory=list)
    connections: int = 0


Serve = Callable[..., Awaitable[Server]]


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head, await reader.readexactly(length)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server whose script is called for each request; it closes a connection when the script closes it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script | bytes, **options: object) -> Server:
            tasks: set[asyncio.Task[None]] = set()

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                tasks.add(task)
                number = server.connections
                server.connections += 1
                try:
                    while not writer.is_closing():
                        head, body = await _read_request(reader)
                        peer = Peer(reader, writer, number, head, body)
                        server.peers.append(peer)
                        await (peer.say(script) if isinstance(script, bytes) else script(peer))
                except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                    pass
                finally:
                    writer.transport.abort()

            listening = await asyncio.start_server(talk, "127.0.0.1", 0, **options)

            async def stop() -> None:
                listening.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(0)

            stack.push_async_callback(stop)
            port = listening.sockets[0].getsockname()[1]
            server = Server(f"{'https' if 'ssl' in options else 'http'}://127.0.0.1:{port}")
            return server

        yield start


@pytest.fixture
def anchored() -> clock.AnchoredClock:
    return clock.AnchoredClock(offset_ns=time.time_ns() - time.monotonic_ns())


@pytest.fixture
def recorded(shared: Path) -> Path:
    """The recordings of a real vLLM."""
    return shared / "fixtures/vllm/recorded"


class Wire:
    """Pieces of an OpenAI reply as bytes on the wire."""

    SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    ROLE = '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    END = b"0\r\n\r\n"

    @staticmethod
    def event(payload: str) -> bytes:
        """One event in a chunk of its own."""
        data = f"data: {payload}\n\n".encode()
        return b"%x\r\n%b\r\n" % (len(data), data)

    @staticmethod
    def content(text: str, finish: str | None = None) -> str:
        return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})

    @staticmethod
    def usage(prompt: int, completion: int) -> str:
        return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    @classmethod
    def answer(cls, tokens: int) -> bytes:
        """A whole streamed chat reply."""
        texts = [cls.content(f" w{i}") for i in range(tokens)]
        payloads = [cls.ROLE, *texts, cls.content("", "length"), cls.usage(10, tokens), "[DONE]"]
        return cls.SSE_HEAD + b"".join(map(cls.event, payloads)) + cls.END


@pytest.fixture
def wire() -> type[Wire]:
    return Wire


class TokenServer:
    """A server's /tokenize and /detokenize; `template` is how many tokens a chat has beside its texts, None: no chats.

    `most` is how many requests it had at once.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], template: int | None
    ) -> None:
        self._encode, self._decode, self._template = encode, decode, template
        self._here = self.most = 0

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self._here += 1
        self.most = max(self.most, self._here)
        await asyncio.sleep(0)
        self._here -= 1
        if "messages" in asked and self._template is None:
            return web.Response(status=400)
        if "messages" in asked:
            tokens = self._encode("." * self._template + "".join(message["content"] for message in asked["messages"]))
        else:
            assert asked["add_special_tokens"] is False
            tokens = self._encode(asked["prompt"])
        return web.json_response({"count": len(tokens), "max_model_len": 2048, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self._decode((await request.json())["tokens"])})


Tokenizing = Callable[..., Awaitable[tuple[TokenServer, tokenizers.ServerTokenizer]]]


@pytest.fixture
async def tokenizing() -> AsyncIterator[Tokenizing]:
    """What starts such servers, by default with a token a character, and finds their tokenizers."""
    async with AsyncExitStack() as stack:

        async def start(
            encode: Callable[[str], list[int]] = lambda text: [ord(letter) for letter in text],
            decode: Callable[[list[int]], str] = lambda tokens: "".join(map(chr, tokens)),
            template: int | None = 7,
        ) -> tuple[TokenServer, tokenizers.ServerTokenizer]:
            vocabulary = TokenServer(encode, decode, template)
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post("/tokenize", vocabulary.tokenize)
            app.router.add_post("/detokenize", vocabulary.detokenize)
            server = await stack.enter_async_context(TestServer(app))
            tokenizer = await tokenizers.probe_server(str(server.make_url("/v1")), "m", {})
            assert isinstance(tokenizer, tokenizers.ServerTokenizer)
            return vocabulary, await stack.enter_async_context(tokenizer)

        yield start


@pytest.fixture
def certificate(authority: Authority) -> tuple[Path, Path]:
    """Key and certificate of a server at 127.0.0.1."""
    return Path(authority.path("solo.key")), Path(authority.path("solo.pem"))


class Worker:
    """A load worker as a process of its own, spoken to as the conductor does."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, offset_ns: int) -> None:
        self.process = process
        self.directory = directory
        self.clock = clock.AnchoredClock(offset_ns=offset_ns)

    async def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), BOUND_S)
        return json.loads(line) if line else {}

    async def run(self, *offsets: int, close: bool = True, leave_ns: int = -1, **command: object) -> None:
        plan(self.directory / "plan", *offsets, close=close, leave_ns=leave_ns)
        start_ns = self.clock.now_ns()
        await self.send(**{"cmd": "run", "plan": str(self.directory / "plan"), "start_ns": start_ns} | command)

    def plan(self, *offsets: int, name: str = "plan", urls: int = 1, first: int = 0) -> None:
        plan(self.directory / name, *offsets, urls=urls, first=first)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():  # noqa: ASYNC110  # the worker is another process
                await asyncio.sleep(0.005)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), BOUND_S)

    def log(self) -> RequestLog:
        return assembled(self.directory)


def plan(path: Path, *offsets: int, close: bool = True, urls: int = 1, first: int = 0, leave_ns: int = -1) -> None:
    """Append requests to a plan, numbered from `first` on, and close it."""
    frame_log = frames.FrameLog(path)
    for index, offset_ns in enumerate(offsets, first):
        body = b'{"n":%d}' % index
        planned = records.PlannedRequest(
            index=index, phase="measure", path=PATH, body=body, offset_ns=offset_ns, url=index % urls, leave_ns=leave_ns
        )
        records.append_record(frame_log, planned)
    if close:
        records.append_record(frame_log, records.plan_end("measure"))
    frame_log.close()


def assembled(directory: Path) -> RequestLog:
    logged = [record for path in sorted(directory.glob("requests-*.log")) for record in records.read_log(path)]
    parts = [record for record in logged if isinstance(record, records.RequestPart)]
    return assemble(records.read_plan(directory / "plan"), parts, run_id="run")


Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """What starts load workers that leave their logs in the test's directory; all are gone at its end."""
    async with AsyncExitStack() as stack:

        async def begin(url: str, *, ready: bool = True, prelude: str = "", **changes: object) -> Worker:
            offset_ns = time.time_ns() - time.monotonic_ns()
            spec = {
                "worker": 0, "workers": 1, "run_id": "run", "clock_offset_ns": offset_ns, "urls": [url], "headers": {},
                "out": str(tmp_path / f"requests-{changes.get('worker', 0)}.log"), "request_timeout_s": BOUND_S,
            } | changes  # fmt: skip
            code = f"{prelude}\nimport sys\nfrom sidelight.loadgen.worker import main\nsys.exit(main())"
            process = await stack.enter_async_context(piped("-c", code))
            worker = Worker(process, tmp_path, offset_ns)
            await worker.send(**spec)
            if ready:
                assert {"event": "ready"} == await worker.hear()
            return worker

        yield begin
