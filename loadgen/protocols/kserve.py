"""KServe v2's ModelStreamInfer over gRPC, as Triton serves TensorRT-LLM: tensors in, a tensor of text a response.

A request is a serialized ModelInferRequest, a response a serialized ModelStreamInferResponse. protobuf is imported when
the first message is made or read.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.reading.timings import Count
from sidelight.loadgen.protocols.request import RequestContent, joined, with_extra

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

_FINAL = "triton_final_response"
# The outputs that are read, and what they consist of.
_OUTPUTS = {
    "text_output": list[bytes],
    "finish_reason": list[bytes],
    "num_input_tokens": list[Count],
    "num_output_tokens": list[Count],
}
# KServe's name of a type, and the field of InferTensorContents that holds it.
_DATATYPES = {bool: ("BOOL", "bool_contents"), int: ("INT32", "int_contents"), float: ("FP32", "fp32_contents")}


@cache
def _messages() -> dict[str, Any]:
    """Return the message classes by name, from the compiled kserve.proto. They are in a pool of their own."""
    # Heavy, and only gRPC needs it.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    compiled = resources.files("sidelight.loadgen.protocols").joinpath("kserve.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    pool = descriptor_pool.DescriptorPool()
    return {
        name.removeprefix("inference."): kind for name, kind in message_factory.GetMessages(files, pool=pool).items()
    }


def body(asked: RequestContent) -> bytes:
    """Write a ModelInferRequest; `extra` adds or (with None) removes tensors of shape [1, 1].

    `ignore_eos` is a parameter of the request: Triton hands it on, and what does not know it does not mind.
    """
    request = _messages()["ModelInferRequest"](model_name=asked.target.model)
    tensors: dict[str, object] = {
        "text_input": joined(asked.prompt),
        "max_tokens": asked.max_tokens,
        "stream": True,
        "temperature": float(asked.temperature),
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    for name, value in with_extra(tensors, asked.target).items():
        tensor = request.inputs.add(name=name, shape=[1, 1])
        if type(value) in _DATATYPES:
            tensor.datatype, contents = _DATATYPES[type(value)]
            getattr(tensor.contents, contents).append(value)
        else:
            tensor.datatype = "BYTES"
            tensor.contents.bytes_contents.append(str(value).encode())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if asked.ignore_eos:
        request.parameters["ignore_eos"].bool_param = True
    return bytes(request.SerializeToString(deterministic=True))


def carry(previous_body: bytes, reply_text: str, added_body: bytes) -> bytes:
    """Return the next turn of a session: the text so far, the reply, and what the turn adds, as one text."""
    kind = _messages()["ModelInferRequest"]
    request = kind.FromString(added_body)
    said = [_text_input(body) for body in (kind.FromString(previous_body), request)]
    for tensor in request.inputs:
        if tensor.name == "text_input":
            tensor.contents.bytes_contents[0] = said[0] + reply_text.encode() + said[1]
    return bytes(request.SerializeToString(deterministic=True))


def _text_input(request: Any) -> bytes:
    return next(bytes(tensor.contents.bytes_contents[0]) for tensor in request.inputs if tensor.name == "text_input")


def _take(seen: ReplyState, event: SseEvent) -> None:
    if not event.data:
        # How the transport records that the call ended well: a server that sends no final response has said all.
        seen.done_end = event.end
        return
    message = _decoded(event.data)
    if message.error_message:
        seen.fail(" ".join(message.error_message.split()))
        return
    response = message.infer_response
    seen.response_id = seen.response_id or response.id
    raw = response.raw_output_contents
    for number, output in enumerate(response.outputs):
        if output.name not in _OUTPUTS:
            continue
        values = msgspec.convert(_values(output, raw[number] if number < len(raw) else None), _OUTPUTS[output.name])
        if output.name == "text_output":
            seen.say(event.end, b"".join(values).decode(errors="replace"))
        elif output.name == "finish_reason" and any(values):
            seen.finish(b"".join(values).decode(errors="replace"))
        elif output.name == "num_input_tokens" and values:
            seen.count(values[0], None)
        elif output.name == "num_output_tokens" and values:
            # Each response tells its own tokens (Triton's vLLM backend, additional outputs).
            seen.count(None, msgspec.convert(max(seen.output_tokens, 0) + values[0], Count))
    if _FINAL in response.parameters and response.parameters[_FINAL].bool_param:
        seen.done_end = event.end


def _decoded(data: bytes) -> Any:
    from google.protobuf.message import DecodeError  # noqa: PLC0415  # as in _messages

    try:
        return _messages()["ModelStreamInferResponse"].FromString(data)
    except DecodeError as error:
        raise UNREADABLE[0](f"{error}") from None


def _values(output: Any, raw: bytes | None) -> list[Any]:
    """Return the elements of an output tensor. They come from its typed contents or from the raw ones beside it."""
    contents = output.contents
    if raw is None:
        fields = (contents.bytes_contents, contents.int_contents, contents.uint_contents, contents.int64_contents)
        return [value for field in fields for value in field]
    if output.datatype == "BYTES":
        return _elements(raw)
    width = 8 if output.datatype.endswith("64") else 4
    return [int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)]


def _elements(raw: bytes) -> list[bytes]:
    """Return the elements of a raw tensor of bytes: each stands behind its length."""
    values, at = [], 0
    while at + 4 <= len(raw):
        begin, at = at + 4, at + 4 + int.from_bytes(raw[at : at + 4], "little")
        values.append(raw[begin:at])
    return values


FORM = Form(messages=True, take=_take)
