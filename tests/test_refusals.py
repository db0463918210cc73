"""What a run refuses, as a user sees it: a process that ends at once, with one line and the right exit code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from processes import refused, sidelight


def answering(status: int, kind: str, body: bytes) -> TestServer:
    """Make a server that answers everything with this."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, content_type=kind, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return TestServer(app)


async def refusal(code: int, path: Path, *options: str) -> str:
    """Return the one line of a run that was not begun."""
    return refused(await asyncio.to_thread(sidelight, "run", "--out", path, *options, path=path), code)


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (200, "text/html", b"<!doctype html><title>Shop</title>", "this is a web page, not an OpenAI-compatible"),
        (404, "text/html", b"<h1>Not found</h1>", "HTTP 404; this is not an OpenAI-compatible endpoint"),
        (200, "application/json", b'{"hello": "world"}', "not a list of models"),
        (401, "application/json", b'{"error": "no key"}', "SIDELIGHT_API_KEY"),
    ],
    ids=["web page", "not found", "other JSON", "unauthorised"],
)
async def test_something_else_at_the_url_is_exit_3(tmp_path: Path, status: int, kind: str, body: bytes, said: str):
    """What it is, in one line, and no run directory."""
    async with answering(status, kind, body) as server:
        url = f"http://127.0.0.1:{server.port}"
        line = await refusal(3, tmp_path / "run", "--url", url)
    assert said in line
    assert url in line


async def test_a_model_must_be_one_that_is_served(tmp_path: Path):
    """The line lists those that are; where there are several, one has to be named."""
    models = json.dumps({"data": [{"id": "llama"}, {"id": "qwen", "max_model_len": 4096}]}).encode()
    async with answering(200, "application/json", models) as server:
        url = f"http://127.0.0.1:{server.port}"
        unknown = await refusal(2, tmp_path / "run", "--url", url, "--model", "gpt-9")
        unnamed = await refusal(2, tmp_path / "run", "--url", f"{url}/v1/")
    assert unknown == f"sidelight: --model gpt-9: not served; {url}/v1/models serves: llama, qwen\n"
    assert unnamed == f"sidelight: --model is missing; {url}/v1/models serves: llama, qwen\n"


def test_a_directory_in_use_is_exit_2(tmp_path: Path):
    """And what is in it stays as it was."""
    (tmp_path / "manifest.json").write_text("{}")
    run = sidelight("run", "--url", "http://192.0.2.1", "--out", tmp_path)
    assert (2, "", 1) == (run.code, run.out, run.err.count("\n"))
    assert run.err.startswith(f"sidelight: --out {tmp_path}: holds another run")
    assert ["{}"] == [path.read_text() for path in tmp_path.iterdir()]
