"""Workloads: the draft's reference workloads, data sets, traces and a user's own distributions.

A workload is a deterministic sequence of requests, endless but for a trace's, and what a report must state of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidelight.loadgen.plan.workloads.fields import WorkloadError, nearest
from sidelight.loadgen.plan.workloads.request import Shared, Turn, WorkloadRequest

if TYPE_CHECKING:
    from sidelight.loadgen.plan.workloads.custom import CustomWorkload
    from sidelight.loadgen.plan.workloads.mix import RequestClass
    from sidelight.loadgen.protocols.table import Protocol

__all__ = [
    "NAMES",
    "Lengths",
    "ReadyWorkload",
    "Shared",
    "Turn",
    "WorkloadError",
    "WorkloadRequest",
    "build",
    "check",
    "given",
    "likenesses",
]

# The draft's five, in its order, and others that have a name.
NAMES: tuple[str, ...] = (
    "synthetic-uniform",
    "synthetic-skewed",
    "conversation",
    "code-completion",
    "long-context",
    "siclait",
    "trace",
)
READ_A_FILE = ("conversation", "code-completion")
STAND_IN = "synthetic stand-in"
_YAML = (".yaml", ".yml")
_OWN = "own prompts"
_OF_THE_DATA = "that of the data set"
_SHAREGPT = {"domain": "conversations with assistants", "language": _OF_THE_DATA}
_THE_STACK = {"domain": "source code", "language": _OF_THE_DATA}
_DRAFT = "draft-gaikwad-llm-benchmarking-methodology-00"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyWorkload:
    """A workload that is ready to be planned.

    label     its name as a report shows it: a stand-in says that it is one
    requests  in order; the same for the same seed
    about     what the manifest states of it, plain JSON values
    notes     what the user is warned of once
    headers   the header sets that single requests name by their position
    held      how many requests a file of prompts holds; None of a workload that does not repeat
    """

    label: str
    requests: Iterator[WorkloadRequest]
    about: dict[str, Any]
    notes: tuple[str, ...] = ()
    headers: tuple[Mapping[str, str], ...] = ()
    held: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths that are given in place of a workload's own, as `custom.parse_lengths` reads them; None: its own."""

    input_tokens: str | None = None
    output_tokens: str | None = None

    def __bool__(self) -> bool:
        return self.input_tokens is not None or self.output_tokens is not None


def check(name: str, *, dataset: Path | None = None, trace: Path | None = None, lengths: Lengths = Lengths()) -> None:
    """Raise WorkloadError for a name, workload file or combination that cannot be; reads no data set and no trace."""
    if lengths:
        _with_lengths([], lengths)
    if _is_own(name):
        _read_own(name)
    elif name not in NAMES:
        raise WorkloadError(
            "workload.unknown",
            f"unknown workload {name!r}{nearest(name, NAMES)}; known: {', '.join(NAMES)}, or a YAML file's path",
        )
    if dataset is not None and name not in READ_A_FILE:
        raise WorkloadError(
            "dataset.not-read",
            f"--dataset {dataset}: {name} reads no data set; add --workload conversation (ShareGPT) or code-completion "
            "(The Stack), or send prompts of your own with --prompts FILE (docs/reference/workloads.md)",
        )
    if lengths and (name == "trace" or dataset is not None):
        given = "--input-tokens" if lengths.input_tokens is not None else "--output-tokens"
        other = "--workload trace" if name == "trace" else f"--dataset {dataset}"
        raise WorkloadError(
            "option.contradictory", f"{given} and {other} exclude each other: the file has the lengths; leave one out"
        )
    if name == "trace" and trace is None:
        raise WorkloadError("option.missing", "workload trace needs a file; give it with --trace FILE")


def build(
    name: str,
    *,
    seed: int,
    dataset: Path | None = None,
    trace: Path | None = None,
    sessions: bool = False,
    think_s: float = 0.0,
    lengths: Lengths = Lengths(),
) -> ReadyWorkload:
    """Return a workload by its name or from its definition.

    The definition is a YAML file's path, or such a file's content as JSON.

    dataset   the file that `conversation` (ShareGPT JSON) or `code-completion` (The Stack, Parquet or JSON lines)
              reads; without it they are a synthetic stand-in and say so
    trace     the file whose lengths `trace` has
    sessions  the later messages of a file's conversations are sent as later turns, `think_s` seconds after the reply
    lengths   in place of the workload's own, in all its classes; not of a trace or a data set, which have theirs

    Raises WorkloadError (a ValueError) naming the field or file, the value and the cure; a trace's own error is a
    ValueError too.
    """
    check(name, dataset=dataset, trace=trace, lengths=lengths)
    if _is_own(name):
        return _custom(name, seed, lengths)
    if name == "trace" and trace is not None:
        return _trace(trace, seed)
    if dataset is not None:
        return _from_file(name, dataset, seed, think_s=think_s if sessions else None)
    return _generated(name, seed, lengths)


def _is_own(name: str) -> bool:
    return _is_inline(name) or (name not in NAMES and (name.lower().endswith(_YAML) or "/" in name))


def _is_inline(name: str) -> bool:
    return name.lstrip().startswith("{")


def _read_own(name: str) -> CustomWorkload:
    from sidelight.loadgen.plan.workloads import custom  # noqa: PLC0415  # most runs need neither YAML's parser nor this

    return custom.read_inline(name) if _is_inline(name) else custom.read(Path(name))


def _custom(name: str, seed: int, lengths: Lengths) -> ReadyWorkload:
    from sidelight.loadgen.plan.workloads import mix  # noqa: PLC0415  # as above

    custom = _read_own(name)
    classes = _with_lengths(custom.classes, lengths)
    about = {**({} if _is_inline(name) else {"file": name}), **mix.about(classes)}
    return ReadyWorkload(
        label=f"{_named(custom.name, lengths)} (custom)",
        requests=mix.requests(classes, seed=seed),
        about=_about(custom.name, seed, about, source="custom"),
    )


def _with_lengths(classes: Sequence[RequestClass], lengths: Lengths) -> list[RequestClass]:
    """Return classes with the lengths that are given in place of theirs. Raises WorkloadError naming the option."""
    from sidelight.loadgen.plan.workloads.custom import parse_lengths  # noqa: PLC0415  # as above

    given: dict[str, Any] = {}
    for name in ("input_tokens", "output_tokens"):
        text = getattr(lengths, name)
        try:
            given |= {} if text is None else {name: parse_lengths(text)}
        except WorkloadError as error:
            raise WorkloadError(error.code, f"--{name.replace('_', '-')} {text}: {error}") from error
    return [replace(traffic_class, **given) for traffic_class in classes]


def _named(name: str, lengths: Lengths) -> str:
    """Return a workload's name with the lengths that were given; the default's name says nothing beside both."""
    given = [
        f"{text} tokens {way}" for text, way in ((lengths.input_tokens, "in"), (lengths.output_tokens, "out")) if text
    ]
    names = [] if len(given) > 1 and name == NAMES[0] else [name]
    return ", ".join([*names, *given])


def _generated(name: str, seed: int, lengths: Lengths) -> ReadyWorkload:
    from sidelight.loadgen.plan.workloads import mix, reference  # noqa: PLC0415  # as above

    if lengths:
        classes = _with_lengths([reference.CLASSES[name]], lengths)
        label = _named(name, lengths)
        return ReadyWorkload(
            label=label,
            requests=mix.requests(classes, seed=seed),
            about=_about(label, seed, mix.about(classes), source="custom"),
        )

    stand_in = name in READ_A_FILE
    assumed = [text for table in (reference.ASSUMPTIONS, reference.STAND_IN_ASSUMPTIONS) if (text := table.get(name))]
    label = f"{name} ({STAND_IN})" if stand_in else name
    about = {**mix.about([reference.CLASSES[name]]), "assumptions": assumed, "stand_in": stand_in}
    source = "inference benchmarking from scratch" if name == "siclait" else _DRAFT
    note = f"{name}: no --dataset, so the requests are a {STAND_IN} with the draft's lengths, not the draft's data set"
    uniform = name == reference.UNIFORM
    return ReadyWorkload(
        label=label,
        requests=reference.uniform_requests(seed=seed)
        if uniform
        else mix.requests([reference.CLASSES[name]], seed=seed),
        about=_about(label, seed, about, source=source),
        notes=(note,) if stand_in else (),
    )


def _from_file(name: str, path: Path, seed: int, *, think_s: float | None) -> ReadyWorkload:
    from sidelight.loadgen.plan.workloads import code_completion, conversation, distributions  # noqa: PLC0415  # as above
    from sidelight.loadgen.plan.workloads.reference import ASSUMPTIONS, CODE_OUTPUT, REPOSITORIES, SYSTEM_PROMPT  # noqa: PLC0415

    about: dict[str, Any] = {"assumptions": [ASSUMPTIONS[name]], "stand_in": False, "temperature": 0.0}
    if name == conversation.NAME:
        conversations, data = conversation.read(path)
        requests = conversation.requests(
            conversations, seed=seed, think_s=None if think_s is None else distributions.Fixed(think_s)
        )
        about |= {
            "data": data,
            **_SHAREGPT,
            "system_prompt": SYSTEM_PROMPT.about(),
            "think_time_s": think_s,
            "control": "max_tokens",
        }
        notes = conversation.notes(data, sessions=think_s is not None)
    else:
        corpus, data = code_completion.read(path)
        requests = code_completion.requests(corpus, seed=seed)
        output = {**distributions.about(CODE_OUTPUT), "control": "max_tokens"}
        about |= {"data": data, **_THE_STACK, "shared_prefix": REPOSITORIES.about(), "output_tokens": output}
        notes = code_completion.notes(data)
    return ReadyWorkload(label=name, requests=requests, about=_about(name, seed, about), notes=notes)


def _trace(path: Path, seed: int) -> ReadyWorkload:
    from sidelight.loadgen.plan.traces import read_trace  # noqa: PLC0415  # as above
    from sidelight.loadgen.plan.workloads import replayed  # noqa: PLC0415
    from sidelight.loadgen.plan.workloads.fields import about_file  # noqa: PLC0415

    data = about_file(path, "--trace")
    trace = read_trace(path)
    label = f"trace {trace.name}"
    return ReadyWorkload(
        label=label,
        requests=replayed.requests(trace, seed=seed),
        about=_about(label, seed, {"data": data, **replayed.about(trace)}, source=trace.name),
        notes=trace.notes,
    )


def given(
    path: Path,
    *,
    seed: int,
    protocol: Protocol,
    sessions: bool = False,
    think_s: float = 0.0,
    output_tokens: int | None = None,
) -> ReadyWorkload:
    """Return the workload of a user's own prompts, as a protocol can send them.

    output_tokens  of prompts that state none; ShareGPT's have the length of their replies
    sessions  of ShareGPT, the later messages are later turns; `think_s` seconds after the reply, where none are stated

    Raises WorkloadError as `build` does.
    """
    from sidelight.loadgen.plan.workloads import conversation, prompts  # noqa: PLC0415  # as above

    label = f"{prompts.NAME} {path.name}"
    if _is_sharegpt(path):
        conversations, data = conversation.read(path)
        about = {
            "data": {**data, "order": prompts.ORDER},
            **_SHAREGPT,
            "prompts": len(conversations),
            "stand_in": False,
        }
        return ReadyWorkload(
            label=label,
            requests=conversation.in_order(conversations, think_s=think_s if sessions else None),
            about=_about(label, seed, about, source=_OWN),
            notes=conversation.notes(data, sessions=sessions),
            held=len(conversations),
        )
    saved_prompts = prompts.read(path)
    prompts.require(saved_prompts, protocol)
    length = prompts.OUTPUT_TOKENS if output_tokens is None else output_tokens
    return ReadyWorkload(
        label=label,
        requests=prompts.requests(saved_prompts, output_tokens=length, think_s=think_s),
        about=_about(label, seed, prompts.about(saved_prompts, output_tokens=length), source=_OWN),
        notes=prompts.notes(saved_prompts, output_tokens=length),
        headers=tuple(saved_prompts.file.headers),
        held=len(saved_prompts.requests),
    )


def likenesses(
    path: Path, *, seed: int, protocol: Protocol, output_tokens: int | None = None
) -> Iterator[WorkloadRequest]:
    """Yield warm-up requests as long as a user's prompts, but with other words. Raises WorkloadError."""
    from sidelight.loadgen.plan.workloads import prompts  # noqa: PLC0415  # as above

    of_file = given(path, seed=seed, protocol=protocol, output_tokens=output_tokens)
    return prompts.likenesses(of_file.requests, seed=seed)


def _is_sharegpt(path: Path) -> bool:
    from sidelight.loadgen.plan.prompts import format_of  # noqa: PLC0415  # as above
    from sidelight.loadgen.plan.workloads.fields import unreadable  # noqa: PLC0415

    try:
        return format_of(path) == "ShareGPT"
    except OSError as error:
        raise unreadable(path, error, "--prompts") from error


def _about(name: str, seed: int, rest: dict[str, Any], *, source: str = _DRAFT) -> dict[str, Any]:
    return {"name": name, "seed": seed, "source": source, **rest}
