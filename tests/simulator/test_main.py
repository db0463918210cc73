"""The simulator as a process."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

import pytest
from waiting import BOUND_S

from sidelight.simulator.__main__ import main


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a simulator and give it with its URL; it is killed in the end if it has not ended."""
    command = [sys.executable, "-m", "sidelight.simulator", "--speed-profile", "fast", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            ready = json.loads(child.stdout.readline())
            assert "ready" == ready["event"]
            yield child, ready["url"]
        finally:
            child.kill()


def test_it_serves_until_a_signal_and_exits_0(tmp_path: Path):
    """The ready line names the URL; a request is answered and its truth written; SIGTERM ends it."""
    truth = tmp_path / "truth.jsonl"
    with process("--model", "m", "--truth", str(truth)) as (child, url):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=BOUND_S)
        body = b'{"model": "m", "prompt": "hi", "max_tokens": 2}'
        connection.request("POST", "/v1/completions", body, {"X-Request-Id": "r1"})
        assert "cmpl-r1" == json.load(connection.getresponse())["id"]
        connection.close()
        # Written at finish, not at exit.
        assert "r1" == json.loads(truth.read_text())["request_id"]
        assert 0o600 == S_IMODE(truth.stat().st_mode)
        child.send_signal(signal.SIGTERM)
        assert 0 == child.wait(timeout=BOUND_S)


def test_it_ends_with_its_parents_pipe():
    """With --exit-on-eof the end of standard input ends it."""
    with process("--exit-on-eof") as (child, _):
        assert child.stdin is not None
        child.stdin.close()
        assert 0 == child.wait(timeout=BOUND_S)


def test_an_occupied_port_is_one_line_and_exit_2():
    """The line says where it could not listen."""
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        command = [sys.executable, "-m", "sidelight.simulator", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    said = f"simulator: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port, or 0\n"
    assert (2, "", said) == (ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "sglan"], "--engine sglan: choose from vllm, sglang, trtllm; did you mean sglang?"),
        (["--speed-profile", "warp"], "--speed-profile warp: choose from demo, fast"),
        (["--kv-blocks", "3"], "--kv-blocks 3: one request of --max-model-len 8192 needs 512; raise --kv-blocks or"),
        (["--kv-blocks", "0"], "--kv-blocks 0: must be 1 or more"),
        (["--kv-host-blocks=-1"], "--kv-host-blocks -1: must be 0 or more"),
        (["--kv-host-blocks", "9", "--role", "decode"], "--kv-host-blocks: not with --role decode"),
        (["--kv-host-blocks", "9", "--engine", "trtllm"], "--kv-host-blocks: not with --engine trtllm; vllm and"),
        (["--max-num-seqs", "2000"], "--max-num-batched-tokens 1024: must be at least --max-num-seqs 2000"),
        (["--port", "99999"], "--port 99999: a port is 1 to 65535, and 0 picks a free one"),
        (["--grpc-port", "70000"], "--grpc-port 70000: a port is 1 to 65535, and 0 picks a free one"),
        (["--perf-metrics", "-1"], "--perf-metrics -1: must be 0 or more"),
        (["--policy", "fif"], "--policy fif: choose from fcfs, shortest-first, priority"),
        (["--slow", "inf"], "--slow inf: must be from 0.001 to 1000"),
        (["--drift", "much"], "--drift: 'much' is not a number; write PERCENT/h, as in 5%/h"),
        (["--drift=-95%/h"], "--drift -95%/h: must be from -90%/h to 10000%/h"),
        (["--oom-at", "0"], "--oom-at 0: must be 1 or more"),
        (["--oom-exits"], "--oom-exits: needs --oom-at N, the sequences at which memory runs out"),
        (["--fail-above", "0"], "--fail-above 0: must be 1 or more"),
        (["--guard-input", "5:x"], "--guard-input: 'x' is not a number; write MS or MS:US, as in 30 or 30:50"),
        (["--guard-input=-3"], "--guard-input: must take from 0 s to an hour, not -0.003 s"),
        (["--guard-output", "5"], "--guard-output: '' is not a number; write N:MS, as in 50:40"),
        (["--guard-refuse", "2"], "--guard-refuse 2: must be from 0 to 1"),
        (["--role", "decod"], "--role decod: choose from prefill, decode; did you mean decode?"),
        (["--role", "decode", "--engine", "trtllm"], "--role decode: not with --engine trtllm; vllm and sglang"),
        (["--kv-transfer", "20"], "--kv-transfer 20: write a time with its unit, as in 20ms or 1.5s"),
        (["--kv-transfer", "5ms+x"], "--kv-transfer: 'x' is not a number; write 5ms+10GB/s"),
        (["--kv-transfer", "5ms+0GB/s"], "--kv-transfer 5ms+0GB/s: the bandwidth must be above 0, as in 5ms+10GB/s"),
        (["--router", "here", "http://h:1"], "--router here: must be the URL of an engine, as in http://127.0.0.1:"),
        (["--router", "http://h:1", "http://h:2", "--hold", "x"], "--hold x: write a time with its unit, as in 20ms"),
        (["--truth-steps", "/nowhere/s"], "--truth-steps /nowhere/s: cannot be written: No such file or directory"),
        (["--model", ""], "--model '': must not be empty"),
        (["--truth", "/nowhere/truth"], "--truth /nowhere/truth: cannot be written: No such file or directory"),
    ],
)
def test_unusable_options_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    """The line names the option and what would be valid."""
    assert 2 == main(arguments)
    written = capsys.readouterr().err
    assert (1, True) == (written.count("\n"), message in written)
