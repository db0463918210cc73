"""How each protocol writes a request, a session's next turn, and the question which models there are."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from array import array
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from sidelight.loadgen.plan.fitting import PlanOrder, plan
from sidelight.loadgen.plan.tokenizers import ReferenceTokenizer
from sidelight.loadgen.plan.workloads.request import WorkloadRequest
from sidelight.loadgen.protocols.request import Prompt, RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS, Endpoint, kserve
from sidelight.loadgen.records import RequestPart
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.transports.grpc import _with_id
from sidelight.loadgen.transports.packing import pack
from sidelight.sidecar.options.load import RunOptions
from sidelight.simulator.api import grpc as grpc_server

REPOSITORY = Path(__file__).parents[2]

X = Prompt(text="x")
SYSTEM = Prompt(text="hé", system="Be brief.")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.5}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", CHAT | STREAMED),
    "completions": (
        "/v1/completions",
        {"model": "m", "prompt": "Be brief.\n\nhé", "max_tokens": 5, "temperature": 0.5} | STREAMED,
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m", "input": [{"role": "user", "content": "hé"}], "instructions": "Be brief.",
            "max_output_tokens": 5, "temperature": 0.5, "stream": True, "store": False, "ignore_eos": True,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 5,
            "temperature": 0.5, "stream": True,
        },
    ),
    "sglang": (
        "/generate",
        {
            "text": "Be brief.\n\nhé", "stream": True,
            "sampling_params": {"max_new_tokens": 5, "temperature": 0.5, "ignore_eos": True},
        },
    ),
    "tgi": (
        "/generate_stream",
        {
            "inputs": "Be brief.\n\nhé",
            "parameters": {
                "max_new_tokens": 5, "details": True, "decoder_input_details": False, "do_sample": True,
                "temperature": 0.5,
            },
        },
    ),
    "ollama": (
        "/api/chat",
        {"model": "m", "messages": MESSAGES, "stream": True, "options": {"num_predict": 5, "temperature": 0.5}},
    ),
    "websocket": ("/v1/stream", CHAT | {"ignore_eos": True}),
    "exo": ("/bench/chat/completions", CHAT | {"stream": False}),
}  # fmt: skip


def _target(protocol: str, **extra: object) -> RequestTarget:
    return RequestTarget(model="m", endpoint=protocol, extra=extra)


def _encoded(protocol: str, prompt: Prompt, **extra: object) -> tuple[str, bytes]:
    return PROTOCOLS[protocol].encode(_target(protocol, **extra), prompt, 5, 0.5)


@pytest.mark.parametrize("protocol", EXPECTED)
def test_a_request_to_the_letter(protocol: str):
    """Path and body; the same bytes each time."""
    path, body = _encoded(protocol, SYSTEM)
    assert EXPECTED[protocol] == (path, json.loads(body))
    assert (path, body) == _encoded(protocol, SYSTEM)


@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_options_of_a_stream_are_asked_of_a_stream_alone(protocol: str):
    """vLLM refuses them otherwise."""
    _, body = _encoded(protocol, SYSTEM, stream=False)
    assert EXPECTED[protocol][1] | {"stream": False} == {**json.loads(body), "stream_options": {"include_usage": True}}


def test_the_table_names_every_protocol():
    """By its own name, each with a transport."""
    assert [*EXPECTED, "grpc"] == sorted(PROTOCOLS, key=[*EXPECTED, "grpc"].index)
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())
    other = {name: protocol.transport for name, protocol in PROTOCOLS.items() if protocol.transport != "http"}
    assert {"websocket": "websocket", "grpc": "grpc"} == other


def _literals(module: ast.AST) -> Iterator[set[object]]:
    """Give the constants of each list, tuple, set and dictionary that is written out in a module."""
    for node in ast.walk(module):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        yield {item.value for item in items if isinstance(item, ast.Constant)}


def test_protocols_are_listed_in_one_place():
    """A new protocol is one module and one row: the command line reads the table, and nothing else lists the names."""
    assert tuple(PROTOCOLS) == get_args(Endpoint) == get_args(get_type_hints(RunOptions)["endpoint"])
    described = (REPOSITORY / "docs/reference/protocols.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert set(PROTOCOLS) == set(re.findall(r"^\| `(\w+)` \|", described, flags=re.MULTILINE))
    for package in ("loadgen", "exporter", "correlator", "sidecar"):
        for path in (REPOSITORY / package).rglob("*.py"):
            names = [constants & set(PROTOCOLS) for constants in _literals(ast.parse(path.read_text(encoding="utf-8")))]
            assert all(len(listed) < 3 for listed in names), path


async def test_a_row_is_all_that_the_load_and_the_report_need(monkeypatch: pytest.MonkeyPatch):
    """A protocol of one's own is planned and read by its name."""
    toy = dataclasses.replace(PROTOCOLS["completions"], name="toy", path="/toy")
    monkeypatch.setitem(PROTOCOLS, "toy", toy)
    order = PlanOrder(phase="measure", count=1)
    workload = [WorkloadRequest(workload_class="c", text="hi", max_tokens=5)]
    planning = plan(workload, target=_target("toy"), tokenizer=ReferenceTokenizer(), order=order)
    (planned,) = [fitted.request async for fitted in planning]
    assert ("/toy", "hi") == (planned.path, json.loads(planned.body)["prompt"])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    packed = pack(array("q", [5]), array("q", [40]), b'data: {"choices": [{"text": "yes"}]}\n\n ')
    part = RequestPart(
        index=0, last=True, status=200, head=head, reads_ns=packed.reads_ns, body=packed.body, packing=packed.packing
    )
    assert [5] == assemble([planned], [part], run_id="r", protocol="toy").first_token_ns.tolist()


@pytest.mark.parametrize("protocol", EXPECTED)
def test_extra_fields_add_replace_and_remove(protocol: str):
    """The target's own fields come last; None leaves one out."""
    name = next(iter(EXPECTED[protocol][1]))
    body = json.loads(_encoded(protocol, X, include_metrics=True, **{name: None})[1])
    assert body["include_metrics"] is True
    assert name not in body


def test_what_is_left_out_of_a_request():
    """No instructions and no system message without a system prompt; no temperature of 0 for TGI; no ignore_eos."""
    bodies = {name: json.loads(_encoded(name, X)[1]) for name in EXPECTED}
    assert "instructions" not in bodies["responses"]
    assert [{"role": "user", "content": "x"}] == bodies["ollama"]["messages"]
    _, body = PROTOCOLS["tgi"].encode(_target("tgi"), X, 5, 0.0)
    assert "temperature" not in json.loads(body)["parameters"]  # which TGI wants above 0
    for name in ("chat", "completions", "responses", "websocket"):
        assert "ignore_eos" not in json.loads(PROTOCOLS[name].encode(_target(name), X, 5, 0.0, ignore_eos=False)[1])


@pytest.mark.parametrize("protocol", ["chat", "ollama", "websocket", "exo", "responses", "messages"])
def test_the_next_turn_of_a_session_with_roles(protocol: str):
    """What was said, the reply, and what the turn adds; settings are the turn's own, and instructions go on."""
    added = json.loads(_encoded(protocol, Prompt(text="and now?"))[1])
    carried = PROTOCOLS[protocol].carry(_encoded(protocol, SYSTEM)[1], "yes", json.dumps(added).encode())
    field = "input" if protocol == "responses" else "messages"
    said = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"}]
    expected = {field: [*EXPECTED[protocol][1][field], *said]}
    goes_on = {"responses": {"instructions": "Be brief."}, "messages": {"system": "Be brief."}}.get(protocol, {})
    assert added | expected | goes_on == json.loads(carried)


@pytest.mark.parametrize(("protocol", "field"), [("completions", "prompt"), ("sglang", "text"), ("tgi", "inputs")])
def test_the_next_turn_of_a_session_without_roles(protocol: str, field: str):
    """One text that goes on."""
    added = _encoded(protocol, Prompt(text=" and now?"))[1]
    body = json.loads(PROTOCOLS[protocol].carry(_encoded(protocol, SYSTEM)[1], " yes", added))
    assert json.loads(added) | {field: "Be brief.\n\nhé yes and now?"} == body


def _tensors(body: bytes) -> dict[str, Any]:
    request = kserve._messages()["ModelInferRequest"].FromString(body)
    assert request.model_name == "m"
    return {
        tensor.name: (tensor.datatype, [*tensor.shape], grpc_server._typed(tensor.contents))
        for tensor in request.inputs
    }


def test_a_grpc_request_to_the_letter():
    """Tensors of one element under a batch of one; what Triton shall say at the end stands in the parameters."""
    path, body = _encoded("grpc", SYSTEM, top_k=3, end_token="é", return_num_input_tokens=None)
    assert path == "/inference.GRPCInferenceService/ModelStreamInfer"
    assert {
        "text_input": ("BYTES", [1, 1], "Be brief.\n\nhé".encode()),
        "max_tokens": ("INT32", [1, 1], 5),
        "stream": ("BOOL", [1, 1], True),
        "temperature": ("FP32", [1, 1], 0.5),
        "return_num_output_tokens": ("BOOL", [1, 1], True),
        "top_k": ("INT32", [1, 1], 3),
        "end_token": ("BYTES", [1, 1], "é".encode()),
    } == _tensors(body)
    request = kserve._messages()["ModelInferRequest"].FromString(_with_id(body, "sl-1"))
    assert {"triton_enable_empty_final_response", "ignore_eos"} == set(request.parameters)
    assert (request.id, request.model_name) == ("sl-1", "m")
    assert body == _encoded("grpc", SYSTEM, top_k=3, end_token="é", return_num_input_tokens=None)[1]


def test_the_next_turn_of_a_grpc_session():
    """One text that goes on, in the tensor of its name."""
    added = _encoded("grpc", Prompt(text=" and now?"))[1]
    carried = PROTOCOLS["grpc"].carry(_encoded("grpc", SYSTEM)[1], " yes", added)
    text = ("BYTES", [1, 1], "Be brief.\n\nhé yes and now?".encode())
    assert _tensors(added) | {"text_input": text} == _tensors(carried)


def test_both_sides_of_grpc_are_compiled_from_one_definition():
    """What the simulator serves is what the load generator asks."""
    ours, theirs = kserve._messages(), grpc_server._messages()
    for name, kind in ours.items():
        assert kind.DESCRIPTOR.file.serialized_pb == theirs[f"inference.{name}"].DESCRIPTOR.file.serialized_pb


def test_the_compiled_definition_is_that_of_the_source():
    """Who changes kserve.proto compiles it again (docs/reference/protocols.md): every field has its name and number."""
    source = resources.files("sidelight.loadgen.protocols").joinpath("kserve.proto").read_text()
    kinds = [nested for kind in kserve._messages().values() for nested in _nested(kind.DESCRIPTOR)]
    fields = [(field.name, str(field.number)) for kind in kinds for field in kind.fields]
    assert sorted(re.findall(r"(\w+) = (\d+);", source)) == sorted(fields)
    assert sorted(re.findall(r"message (\w+)", source)) == sorted(kind.name for kind in kinds)


def _nested(descriptor: Any) -> list[Any]:
    """A message and those inside it, but for what a map is made of."""
    inside = [kind for inner in descriptor.nested_types for kind in _nested(inner)]
    return [] if descriptor.GetOptions().map_entry else [descriptor, *inside]


LISTINGS = {
    "chat": (b'{"data":[{"id":"a","max_model_len":9},{"id":"b"}]}', {"a": 9, "b": None}),
    "ollama": (b'{"models":[{"name":"a","size":3}]}', {"a": None}),
    "tgi": (b'{"model_id":"a","max_total_tokens":9}', {"a": 9}),
}


def test_the_context_that_llamacpp_states_is_a_models_limit():
    """In its `meta`; of others, who may have anything there, it is passed over."""
    listing = PROTOCOLS["chat"].models
    assert listing is not None
    meta = b'{"vocab_type":2,"n_ctx":4096,"n_ctx_train":131072}'
    assert {"a": 4096} == listing.read(b'{"object":"list","data":[{"id":"a","meta":%b}]}' % meta)
    assert {"a": None} == listing.read(b'{"data":[{"id":"a","meta":null}]}')
    assert {"a": None} == listing.read(b'{"data":[{"id":"a","meta":{"n_ctx":"8k"}}]}')


@pytest.mark.parametrize("protocol", LISTINGS)
def test_the_models_of_a_server(protocol: str):
    """By name, with the longest that prompt and reply may be where that is said."""
    listing = PROTOCOLS[protocol].models
    assert listing is not None
    body, expected = LISTINGS[protocol]
    assert expected == listing.read(body)
