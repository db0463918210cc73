"""The workload of a user's own prompts: the file's, in its order, from the top again where more are wanted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sidelight.loadgen.plan.prompts import GivenPrompt, PromptFile, PromptsError, read_prompts
from sidelight.loadgen.plan.tokenizers.reference import reference
from sidelight.loadgen.plan.workloads.content import token_ids
from sidelight.loadgen.plan.workloads.fields import WorkloadError, about_file, file_state, unreadable
from sidelight.loadgen.plan.workloads.mix import stream_rng
from sidelight.loadgen.plan.workloads.request import Turn, WorkloadRequest
from sidelight.loadgen.protocols.request import text_of
from sidelight.loadgen.protocols.table import Protocol
from sidelight.rundir.printable.numbers import agree

NAME = "prompts"
# What vllm bench requests too where a prompt states no length.
OUTPUT_TOKENS = 256
ORDER = "the file's; from the top again when all were sent"

_CONTENT_STREAM = 401
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The requests of a file in its order, a session as one; `max_tokens` 0 is a length that the file does not state.

    about  which file it is
    """

    requests: tuple[WorkloadRequest, ...]
    file: PromptFile
    about: Mapping[str, Any]


def read(path: Path) -> Prompts:
    """Read a file that is not ShareGPT's; the newest is kept in memory, since a warm-up is like it.

    Raises WorkloadError naming the file, the line, the field, its value and the cure.
    """
    return _read(path, file_state(path, "--prompts"))


@lru_cache(maxsize=1)
def _read(path: Path, _state: tuple[int, int]) -> Prompts:
    about = about_file(path, "--prompts")
    try:
        file = read_prompts(path)
    except PromptsError as error:
        raise WorkloadError(error.code, str(error)) from error
    except OSError as error:
        raise unreadable(path, error, "--prompts") from error
    return Prompts(requests=tuple(map(_request, file.sessions)), file=file, about=about)


def _request(session: Sequence[GivenPrompt]) -> WorkloadRequest:
    first, *later = session
    return WorkloadRequest(
        workload_class=NAME,
        text=first.text,
        messages=first.messages,
        max_tokens=first.max_tokens,
        temperature=first.temperature,
        headers=first.headers,
        body=first.tools,
        turns=tuple(
            Turn(
                text=turn.text, messages=turn.messages, max_tokens=turn.max_tokens, think_s=turn.delay_s,
                headers=turn.headers, body=turn.tools,
            )
            for turn in later
        ),
    )  # fmt: skip


def require(prompts: Prompts, protocol: Protocol) -> None:
    """Raise WorkloadError if a prompt needs a feature that the protocol lacks.

    Such features are roles, tools, and headers of a single request.
    """
    places = prompts.file.places
    headers, cures = places.get("headers"), {"messages": "roles; give a prompt", "tools": "tools; leave them out"}
    for name, cure in cures.items():
        if name in places and not protocol.templated:
            raise WorkloadError(
                "prompt.endpoint",
                f"{places[name]}: {name}: --endpoint {protocol.name} has no {cure}, or use --endpoint chat",
            )
    if headers and protocol.transport != "http":
        raise WorkloadError(
            "prompt.endpoint",
            f"{headers}: headers: --endpoint {protocol.name} sends no headers with a single request; give those of all "
            "requests with --header",
        )


def requests(
    prompts: Prompts, *, output_tokens: int = OUTPUT_TOKENS, think_s: float = 0.0
) -> Iterator[WorkloadRequest]:
    """Yield the file's requests in its order, without end. `output_tokens` is used if no length is stated."""
    for request in itertools.cycle(prompts.requests):
        yield replace(
            request,
            max_tokens=request.max_tokens or output_tokens,
            turns=tuple(
                replace(turn, max_tokens=turn.max_tokens or output_tokens, think_s=turn.think_s or think_s)
                for turn in request.turns
            ),
        )


def likenesses(requests: Iterable[WorkloadRequest], *, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests as long as the given ones, but with other words. So nothing measured is in the engine's cache."""
    rng = stream_rng(seed, _CONTENT_STREAM)
    for request in requests:
        text = request.text or text_of(request.messages)
        tokens = max(1, reference().count(text))
        yield WorkloadRequest(
            workload_class=NAME,
            token_ids=token_ids("words", tokens, rng),
            input_tokens=tokens,
            max_tokens=request.max_tokens,
            headers=request.headers,
        )


def about(prompts: Prompts, *, output_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """Return the report's description of the file and of the way it is sent."""
    lengths = [request.max_tokens for request in prompts.requests]
    lengths += [turn.max_tokens for request in prompts.requests for turn in request.turns]
    return {
        "data": dict(prompts.about),
        **dict.fromkeys(("domain", "language"), "not known: the file does not state it"),
        "prompts": len(prompts.requests),
        "turns": len(lengths),
        "sessions": sum(bool(request.turns) for request in prompts.requests),
        "order": ORDER,
        "output_tokens": {
            "control": "max_tokens",
            "unstated": lengths.count(0),
            "where_unstated": output_tokens,
        },
        "header_names": sorted({name for headers in prompts.file.headers for name in headers}),
        "stand_in": False,
    }


def notes(prompts: Prompts, *, output_tokens: int = OUTPUT_TOKENS) -> tuple[str, ...]:
    """Return warnings about fields that are not used and lengths that are missing.

    Missing lengths are those that the file does not state.
    """
    texts = []
    if ignored := prompts.file.ignored:
        fields = ", ".join(f"{name} ({where})" for name, where in itertools.islice(ignored.items(), _NAMED))
        more = f" and {len(ignored) - _NAMED} more" if len(ignored) > _NAMED else ""
        texts.append(f"--prompts: fields that Sidelight does not use are ignored: {fields}{more}")
    stated = about(prompts, output_tokens=output_tokens)
    if unstated := stated["output_tokens"]["unstated"]:
        texts.append(
            f"{unstated} of {stated['turns']} prompts {agree(unstated, 'states', 'state')} no max_tokens: "
            f"{output_tokens} output tokens are requested for each of them"
        )
    return tuple(texts)
