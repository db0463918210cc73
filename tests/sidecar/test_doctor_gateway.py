"""`sidelight doctor --gateway`: what it says of gateways that pass a request on in several ways, over real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest
from codes import raises
from header_echo import HELD_S, PIECES, Way, gateway, header_echo
from processes import engine, sidelight

from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.doctor import examination as doctor
from sidelight.sidecar.doctor.delivery import delivery_lines
from sidelight.sidecar.options.checks import check_doctor
from sidelight.sidecar.options.load import DoctorOptions

MS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """How an examination ended, what was printed, and the trace headers that reached the engine last."""

    code: int
    lines: list[str]
    reached: dict[str, str]

    def marked(self, mark: str) -> list[str]:
        return [line.removeprefix(mark).strip() for line in self.lines if line.startswith(mark)]


Through = Callable[..., Awaitable[Examined]]


@pytest.fixture
def through(capsys: pytest.CaptureFixture[str]) -> Through:
    """Examine a gateway of one way before an engine, whose spans have come when its reply has."""

    async def run(way: Way, *, direct: bool = False, traced: bool = True, software: str = "") -> Examined:
        address = free_pair()
        host, _, port = address.rpartition(":")
        collector = f"http://{host}:{int(port) + 1}"
        async with (
            header_echo(collector if traced else "") as echo,
            gateway(way, echo.url, collector, software=software) as entrance,
        ):
            urls = (echo.url,) if direct else ()
            options = DoctorOptions(url=urls, gateway=entrance, otlp_listen=address, wait=0.0)
            code = await doctor.examine(options)
        lines = capsys.readouterr().out.replace(address, "LISTEN").replace(entrance, "GATEWAY").splitlines()
        return Examined(code=code, lines=lines, reached=echo.seen[-1] if echo.seen else {})

    return run


async def test_a_gateway_that_passes_the_trace_on_is_all_well(through: Through):
    """The header reached the engine, the gateway's part is exact, and the code is 0."""
    done = await through("passes")
    assert (0, []) == (done.code, done.marked("warn"))
    trace = done.reached["traceparent"].split("-")[1]
    assert f"GATEWAY answered a request for 64 tokens, trace {trace}" in done.marked("ok")
    assert "the trace header reached the engine: vLLM's span came in our trace" in done.marked("ok")
    assert "X-Request-Id reached the engine" in done.marked("ok")
    exact = "the span of gateway my-gateway came, and an attribute of its span says when its first output left"
    assert any(line.startswith(exact) for line in done.marked("ok"))
    (parts,) = (line for line in done.marked("ok") if line.startswith("of this request's TTFT of "))
    assert float(parts.partition(", gateway ")[2].partition(" ms")[0]) >= 1e3 * HELD_S


async def test_a_gateway_without_a_first_output_is_a_bound(through: Through):
    """The most that its part can be is given; nothing is broken, and the attribute is named."""
    done = await through("plain")
    assert (0, []) == (done.code, done.marked("warn"))
    (bound,) = (line for line in done.marked("ok") if "its part is known as a bound, here at most " in line)
    assert float(bound.partition("at most ")[2].partition(" ms")[0]) >= 1e3 * HELD_S
    assert any("gen_ai.response.time_to_first_chunk (seconds)" in line for line in done.lines)


async def test_a_new_trace_is_named_with_who_began_it(through: Through):
    """The engine's span is known by its request's id; so is the gateway's."""
    done = await through("renews")
    assert (0, []) == (done.code, done.marked("warn"))
    began = "vLLM's span (known by its id) has another trace id, and my-gateway began that trace"
    joined = "a run joins its requests by their ids"
    assert f"a new trace began behind the gateway: {began}; {joined}" in done.marked("ok")
    assert any(line.startswith("the span of gateway my-gateway came, and ") for line in done.marked("ok"))
    assert "X-Request-Id reached the engine" in done.marked("ok")


@pytest.mark.parametrize(
    ("way", "known"), [("strips", "known by its id"), ("renames", "the only one at the time of our request")]
)
async def test_headers_that_are_dropped(through: Through, way: Way, known: str):
    """The engine's span is the first of its own trace: known by the id in the reply, else by its time alone."""
    done = await through(way)
    assert (1, {}) == (done.code, done.reached)
    first = f"vLLM's span ({known}) is the first of its own trace"
    assert f"the trace header did not reach the engine: {first}" in done.marked("warn")
    assert any("pass on the headers traceparent and tracestate" in line for line in done.lines)
    assert "X-Request-Id did not reach the engine: vLLM's span bears another id" in done.marked("warn")
    assert any(line.startswith("no span of the gateway came") for line in done.marked("warn"))


@pytest.mark.parametrize("way", ["unsampled", "cached"])
async def test_no_span_through_the_gateway_but_one_without_it(through: Through, way: Way):
    """What the gateway does is then the cause; what it can be is named."""
    done = await through(way, direct=True)
    assert 1 == done.code
    assert "vLLM's span came of a request without the gateway: its tracing is on" in done.marked("ok")
    (cause,) = (line for line in done.marked("warn") if line.startswith("no span of the engine came"))
    assert "gateway: the gateway marks the trace as not sampled, or a cache or another engine answered" in cause
    assert any("sample every trace" in line for line in done.lines)


@pytest.mark.parametrize("direct", [False, True])
async def test_an_engine_whose_tracing_is_off(through: Through, direct: bool):
    """Its switch is named, with the address where spans are received, where the list of models says which engine."""
    done = await through("unchanged", direct=direct, traced=False)
    assert 1 == done.code
    assert direct == any("of a request without the gateway: its tracing is off" in line for line in done.lines)
    assert direct != any("with --url http://ENGINE it is asked without the gateway too" in line for line in done.lines)
    assert any("vLLM: --otlp-traces-endpoint http://LISTEN" in line for line in done.lines)
    assert "X-Request-Id reached the engine" in done.marked("ok")  # the reply's id has it


async def test_a_gateway_without_spans_is_asked_for_them(through: Through):
    """The trace is whole, its part is not apart, and both addresses for its exporter are named."""
    done = await through("unchanged")
    assert 1 == done.code
    assert "the trace header reached the engine: vLLM's span came in our trace" in done.marked("ok")
    (parts,) = (line for line in done.marked("ok") if line.startswith("of this request's TTFT of "))
    assert ": outside the engine " in parts
    (switch,) = (line for line in done.lines if "switch its OpenTelemetry tracing on" in line)
    assert "LISTEN (gRPC)" in switch
    assert "(HTTP/protobuf)" in switch


async def test_a_reply_that_is_held_back_until_its_end(through: Through):
    """All its pieces come in one packet, though the engine's span says that it took longer to generate them."""
    done = await through("buffers", direct=True)
    assert 1 == done.code
    (held,) = (line for line in done.marked("warn") if line.startswith(f"all {PIECES} pieces of the reply came in one"))
    assert float(held.partition("for about ")[2].partition(" ms")[0]) > 50
    assert any("proxy_buffering off" in line for line in done.lines)


async def test_a_gateway_that_is_known_is_named_with_its_own_setting(through: Through):
    """By the headers of its replies; one that can send no spans is asked for none."""
    done = await through("buffers", direct=True, software="nginx/1.22.1")
    assert "the gateway is nginx; docs/reference/gateways.md has its settings" in done.marked("ok")
    assert any(line.startswith("no span of the gateway came, and nginx sends none") for line in done.marked("skip"))
    assert ["nginx: proxy_buffering off in the location"] == [line.strip() for line in done.lines if "buffer" in line]


async def test_a_gateway_that_answers_in_one_piece_cannot_be_measured(through: Through):
    """As in a run: the code is 3; what is known of the trace is said all the same."""
    done = await through("json")
    assert 3 == done.code
    (failure,) = done.marked("fail")
    assert "answers application/json, not a stream" in failure
    assert any(line.startswith("no span of the engine came") for line in done.marked("warn"))


async def test_a_gateway_that_does_not_answer(capsys: pytest.CaptureFixture[str]):
    """One line names the option, and the code is 3."""
    code = await doctor.examine(DoctorOptions(gateway="http://127.0.0.1:9", otlp_listen=free_pair()))
    assert 3 == code
    (failed,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("fail"))
    assert "127.0.0.1:9" in failed
    assert failed.endswith("is the server up, and --gateway right? [target.unreachable]")


def test_a_gateway_needs_an_address_for_spans():
    """One line with an example; and the gateway's own path is taken off, as a run's is."""
    with raises("option.contradictory"):
        check_doctor(DoctorOptions(gateway="http://h:1"))
    with raises("option.value"):
        check_doctor(DoctorOptions(gateway="h", otlp_listen="127.0.0.1:4317"))
    assert "http://h:1" == check_doctor(DoctorOptions(gateway="h:1", otlp_listen="127.0.0.1:4317")).gateway
    options = DoctorOptions(gateway="http://h:1/v1/chat/completions", otlp_listen="127.0.0.1:4317")
    assert "http://h:1" == check_doctor(options).gateway


async def test_a_simulated_engine_through_the_command():
    """The engine sends its spans when its exporter does, which is waited for, and standard error says so."""
    address = free_pair()
    host, _, port = address.rpartition(":")
    with engine("--otlp-endpoint", f"http://{address}") as (url, _):
        async with gateway("passes", url, f"http://{host}:{int(port) + 1}") as entrance:
            given = ("--gateway", entrance, "--url", url, "--otlp-listen", address)
            done = await asyncio.to_thread(sidelight, "doctor", *given)
    troubles = [line for line in done.out.splitlines() if line.startswith(("warn", "fail"))]
    # A busy machine lets pieces of the reply pass together.
    assert all("pieces of the reply came in one packet" in line for line in troubles), done.out
    assert int(bool(troubles)) == done.code
    assert "waiting for spans, 12 s at most" in done.err
    assert "ok    the trace header reached the engine: vLLM's span came in our trace" in done.out
    assert "ok    the span of gateway my-gateway came" in done.out


EVEN = [piece * 20 * MS for piece in range(20)]
CORKED = [10 * 20 * MS] * 11 + EVEN[11:]
WHOLE = [400 * MS] * 20


@pytest.mark.parametrize(
    ("chunks", "direct", "generated_s", "mark", "sentence"),
    [
        (EVEN, None, math.nan, "ok", "the reply came in 20 pieces over 380 ms: nothing holds its beginning back"),
        (EVEN[:7], None, 0.4, "skip", "the reply came in 7 pieces: too few to tell whether any were held back"),
        (CORKED, None, math.nan, "warn", "the first 11 of 20 pieces of the reply came in one packet: "),
        (CORKED, None, 0.38, "warn", "the first token was held back for about 200 ms, which counts in TTFT"),
        (CORKED, None, 0.02, "ok", "nothing holds its beginning back"),
        (CORKED, CORKED, 0.38, "ok", "as they do without the gateway"),
        (CORKED, EVEN, math.nan, "warn", "held back for about 200 ms"),
        (WHOLE, None, 0.38, "warn", "all 20 pieces of the reply came in one packet: the first token was held back"),
        (WHOLE, EVEN, math.nan, "warn", "held back for about 380 ms"),
        (WHOLE, WHOLE, math.nan, "ok", "came in one packet, as they do without the gateway"),
        (
            WHOLE,
            None,
            math.nan,
            "warn",
            "came in one packet: a gateway or proxy holds replies back, or the engine sends them whole",
        ),
        (WHOLE, None, 0.01, "skip", "the engine generated all 20 pieces within 10 ms: too fast to tell"),
    ],
)
def test_what_packets_say(chunks: list[int], direct: list[int] | None, generated_s: float, mark: str, sentence: str):
    """What came together was held back for as long as it took to generate, unless the engine itself sends it so."""
    direct_ns = None if direct is None else np.array(direct)
    (first, text), *_ = delivery_lines(np.array(chunks), direct_ns=direct_ns, generated_s=generated_s)
    assert mark == first[0].strip()
    assert sentence in text
