"""KServe v2's ModelStreamInfer over gRPC, as Triton serves TensorRT-LLM: a response a token, then an empty last one.

As Triton does, it tells what is wrong with a request in `error_message`, under the status OK.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc import aio

from sidelight.simulator.api.dialects.dialect import generation, text_of
from sidelight.simulator.api.requests import Generation, RefusedError
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.api.service import Service, submitted
from sidelight.simulator.engine.driver import EngineStoppedError, TokenStream
from sidelight.simulator.engine.history import TokenOutput
from sidelight.simulator.engine.tokenizer import encode

_SERVICE = "inference.GRPCInferenceService"
_GRACE_S = 0.5
_FINAL = "triton_final_response"


@cache
def _messages() -> Mapping[str, Any]:
    """Return the message classes by name, from the compiled loadgen/protocols/kserve.proto."""
    compiled = resources.files("sidelight.simulator").joinpath("kserve.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    return message_factory.GetMessages(files, pool=descriptor_pool.DescriptorPool())


@asynccontextmanager
async def serving(service: Service, host: str, port: int) -> AsyncIterator[int]:
    """Serve for as long as the block lasts, and give the port. Raises OSError when it cannot listen."""
    server = aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "ModelReady": grpc.unary_unary_rpc_method_handler(_ready),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(partial(_infer, service=service)),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(0, f"gRPC port {port}: {error}") from None
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(_GRACE_S)


async def _ready(_request: bytes, _context: Any) -> bytes:
    return bytes(_messages()["inference.ModelReadyResponse"](ready=True).SerializeToString())


async def _infer(requests: AsyncIterator[bytes], context: Any, *, service: Service) -> AsyncIterator[bytes]:
    traceparent = str(dict(context.invocation_metadata()).get("traceparent", ""))
    async for data in requests:
        arrival_ns = service.clock()
        try:
            request = _messages()["inference.ModelInferRequest"].FromString(data)
            asked = _read(request, service)
        except (DecodeError, RefusedError) as error:
            yield _wrong(f"{error}")
            continue
        response_id = f"grpc-{request.id or uuid.uuid4().hex}"
        try:
            async with submitted(service, asked, response_id, arrival_ns, traceparent) as (stream, info):
                async for response in _responses(request, stream, info):
                    yield response
        except (EngineStoppedError, RefusedError) as error:
            yield _wrong(f"{error}")


def _read(request: Any, service: Service) -> Generation:
    """Return the generation that a request asks for. Raises RefusedError."""
    model = service.settings.model
    if request.model_name != model:
        raise RefusedError(404, f"Request for unknown model: '{request.model_name}' is not found")
    inputs = _inputs(request)
    text, limit = inputs.get("text_input"), inputs.get("max_tokens")
    if not isinstance(text, bytes) or not isinstance(limit, int) or limit < 1:
        raise RefusedError(400, "text_input (BYTES) and max_tokens (INT32, above 0) are needed")
    ignore_eos = "ignore_eos" in request.parameters and request.parameters["ignore_eos"].bool_param
    token_ids = encode(text.decode(errors="replace"))
    return generation(token_ids, limit, service.settings, ignore_eos=ignore_eos, stream=bool(inputs.get("stream")))


def _inputs(request: Any) -> dict[str, object]:
    """Return the first element of each input tensor, sent in either of the two ways."""
    raw = request.raw_input_contents
    return {
        tensor.name: _raw(tensor.datatype, raw[number]) if number < len(raw) else _typed(tensor.contents)
        for number, tensor in enumerate(request.inputs)
    }


def _typed(contents: Any) -> object:
    fields = (contents.bytes_contents, contents.int_contents, contents.bool_contents, contents.fp32_contents)
    return next((field[0] for field in fields if field), None)


def _raw(datatype: str, data: bytes) -> object:
    if datatype == "BYTES":  # each text behind its length
        return bytes(data[4 : 4 + int.from_bytes(data[:4], "little")])
    return bool(data[:1].strip(b"\0")) if datatype == "BOOL" else int.from_bytes(data[:4], "little", signed=True)


async def _responses(request: Any, stream: TokenStream, info: ReplyInfo) -> AsyncIterator[bytes]:
    """Yield a response a token, or one of all without a stream. Raises EngineStoppedError."""
    inputs = _inputs(request)
    said: list[TokenOutput] = []
    while stream.record is None or len(said) < stream.record.output_tokens:
        outputs = await stream.take()
        said += outputs
        if inputs.get("stream"):
            for output in outputs:
                yield _response(info, inputs, [output], final=False)
    if not inputs.get("stream"):
        yield _response(info, inputs, said, final=False)
    parameter = "triton_enable_empty_final_response"
    if parameter in request.parameters and request.parameters[parameter].bool_param:
        yield _response(info, inputs, [], final=True)


def _response(info: ReplyInfo, inputs: Mapping[str, object], outputs: list[TokenOutput], *, final: bool) -> bytes:
    message = _messages()["inference.ModelStreamInferResponse"]()
    response = message.infer_response
    response.model_name, response.id = info.model, info.response_id
    response.parameters[_FINAL].bool_param = final
    if outputs:
        text = text_of(outputs).encode()
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        # Triton puts contents there, each text behind its length.
        response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
        counts = {"num_input_tokens": info.prompt_tokens, "num_output_tokens": len(outputs)}
        for name, count in counts.items():
            if inputs.get(f"return_{name}"):
                response.outputs.add(name=name, datatype="INT32", shape=[1])
                response.raw_output_contents.append(count.to_bytes(4, "little"))
    return bytes(message.SerializeToString())


def _wrong(message: str) -> bytes:
    return bytes(_messages()["inference.ModelStreamInferResponse"](error_message=message).SerializeToString())
