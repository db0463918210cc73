"""Reuse of prompts' beginnings: tokens found in prefix caches, and the reasons for those that were not.

A beginning could be found where a request with it had its first token before this one was sent: at the same endpoint,
or at another. What a prompt shares is known by the bytes of its text, in pieces; of a later turn of a session, by the
conversation that it goes on with. A token has its share of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, UnsetType

from sidelight.correlator.exact.table import Joined
from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.run import Run
from sidelight.rundir import fields
from sidelight.rundir.columns import Bools, Floats, Ints, Texts
from sidelight.rundir.fields import UNSET, Count, doc
from sidelight.rundir.stats import Missing

# Ends of the pieces of a prompt's text that are compared, bytes: of 128, some 30 tokens, and longer in long prompts.
_ENDS = np.concatenate([np.arange(128, 8193, 128), np.arange(8704, 65_537, 512), np.arange(69_632, 2**24, 4096)])
BLOCK = 16  # tokens, where no page states them: caches hold whole blocks, and the last token is always computed
LEAST_KNOWN = 0.95  # of the requests: with less, what the others left in a cache is not known
TOKENS = ("prompt_tokens", "cached_tokens", "new_tokens", "elsewhere_tokens", "evicted_tokens")
REUSED = ("expected_cached_tokens", "new_tokens", "elsewhere_tokens", "evicted_tokens")
SLACK_RATIO = 0.1  # of what could be found: tokens are not spread evenly over bytes


class EndpointReuse(Struct, frozen=True, kw_only=True):
    """The reuse of prompts at one endpoint."""

    requests: Annotated[Count, doc("Requests that it served.", "requests")] = 0
    prompt_tokens: Annotated[Count, doc("Tokens of their prompts.", "tokens")] = 0
    cached_tokens: Annotated[Count, doc("Of these, found in its prefix cache.", "tokens")] = 0
    new_tokens: Annotated[Count, doc("In no prompt answered before: the workload's misses.", "tokens")] = 0
    elsewhere_tokens: Annotated[Count, doc("Computed before by other endpoints alone: the routing's.", "tokens")] = 0
    evicted_tokens: Annotated[Count, doc("Computed before by this endpoint, and not found any more.", "tokens")] = 0


class ExpectedReuse(Struct, frozen=True, kw_only=True):
    """The cached tokens that a router expected at its best candidate."""

    requests: Annotated[Count, doc("Requests of which its spans state it.", "requests")]
    expected_tokens: Annotated[Count, doc("Tokens of their prompts that it expected in a cache.", "tokens")]
    cached_tokens: Annotated[Count, doc("Tokens that were there, by the replies.", "tokens")]


class PrefixReuse(Struct, frozen=True, kw_only=True):
    """The reuse of prompts' beginnings, by bytes of the texts that were sent; the last four add up to the prompts."""

    missing: fields.Missing = UNSET
    total: Annotated[EndpointReuse | UnsetType, doc("Of all endpoints.")] = UNSET
    endpoints: Annotated[
        dict[str, EndpointReuse],
        doc("By endpoint: the URL that was asked; of one URL the engine by its spans, else by the router's choice."),
    ] = {}
    expected: Annotated[ExpectedReuse | UnsetType, doc("By routers' spans; absent where none says it.")] = UNSET


class RequestReuse(NamedTuple):
    """Columns of n requests: which engine served each, and the reuse of its prompt, NaN where that is not known.

    served_by               the engine by its spans, of two that shared it the first; where none is named the router's
                            choice; "" where neither says it
    endpoint                the one that it counts to (`PrefixReuse.endpoints`), "" where it is not known
    expected_cached_tokens  what a router expected in a cache, where a span states it
    """

    served_by: Texts
    endpoint: Texts
    expected_cached_tokens: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    new_tokens: Floats
    elsewhere_tokens: Floats
    evicted_tokens: Floats

    def tokens(self) -> dict[str, Floats]:
        """Return the columns of whole tokens that are known of any request."""
        columns = {name: np.rint(getattr(self, name)) for name in ("cached_tokens", *REUSED)}
        return {name: column for name, column in columns.items() if np.isfinite(column).any()}

    def engines(self) -> Texts | None:
        """Return the engine of each request, None of a run with fewer than two."""
        return self.served_by if len(set(self.served_by.tolist()) - {""}) > 1 else None


def reused_label(column: str) -> str:
    """Return the label of a column of `RequestReuse`."""
    return column.removesuffix("_tokens").replace("_", " ")


class RunReuse(NamedTuple):
    """The reuse of prompts by request, and the reason why none is known, else ""."""

    requests: RequestReuse
    missing: str


class Pieces(NamedTuple):
    """The pieces of a prompt: hashes of all up to the end of each, and the tokens up to there; both ascending."""

    beginnings: Ints
    tokens: Floats


class _Prompt(Struct):
    """A request's body, as far as its prompt is in it."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()


def pieces_of(plans: Iterable[PlannedRequest], tokens: Mapping[int, float]) -> dict[int, Pieces]:
    """Return the pieces of planned prompts of known text and `tokens`, by their index."""
    pieces: dict[int, Pieces] = {}
    decode = msgspec.json.Decoder(_Prompt).decode
    for planned in plans:
        before: Pieces | None = None
        for turn in (planned, *planned.turns):
            count = tokens.get(turn.index, np.nan)
            if turn is planned or turn.whole:
                try:
                    body = decode(turn.body)
                except msgspec.DecodeError:  # --redact-bodies
                    break
                before = _of_text(bytes(body.system) + bytes(body.messages) + bytes(body.prompt), count)
            elif before is not None:
                added = hash((int(before.beginnings[-1]), turn.session, turn.turn))
                before = Pieces(np.append(before.beginnings, added), np.append(before.tokens, count))
            if before is None or np.isnan(count):
                break
            pieces[turn.index] = before
    return pieces


def _of_text(text: bytes, tokens: float) -> Pieces | None:
    ends = _ENDS[: np.searchsorted(_ENDS, len(text))].tolist()
    beginning, beginnings = 0, []
    for begin, end in pairwise((0, *ends, len(text))):
        beginning = hash((beginning, text[begin:end]))
        beginnings.append(beginning)
    if not text:
        return None
    return Pieces(np.array(beginnings, dtype=np.int64), tokens * np.array([*ends, len(text)]) / len(text))


def found_before(
    pieces: Sequence[Pieces | None], endpoint: Ints, sent_ns: Ints, answered_ns: Ints
) -> tuple[Floats, Floats]:
    """Return the tokens of each prompt [n] computed before, by its endpoint and by any."""
    here, anywhere = np.zeros((2, len(pieces)))
    answered = iter(np.argsort(answered_ns, kind="stable").tolist())
    computed: dict[int, int] = {}  # endpoints, a bit each, by beginning
    latest = next(answered, None)
    for row in np.argsort(sent_ns, kind="stable").tolist():
        while latest is not None and answered_ns[latest] <= sent_ns[row]:
            if answered_ns[latest] >= 0 and (known := pieces[latest]) is not None:
                for beginning in known.beginnings.tolist():
                    computed[beginning] = computed.get(beginning, 0) | 1 << int(endpoint[latest])
            latest = next(answered, None)
        if (known := pieces[row]) is not None:
            here[row] = _shared(known, computed, 1 << int(endpoint[row]))
            anywhere[row] = _shared(known, computed, -1)
    return here, anywhere


def _shared(pieces: Pieces, computed: Mapping[int, int], endpoints: int) -> float:
    """Return a prompt's tokens up to the first piece computed by none of some endpoints."""
    beginnings = pieces.beginnings.tolist()
    shared = next((at for at, each in enumerate(beginnings) if not computed.get(each, 0) & endpoints), len(beginnings))
    return float(pieces.tokens[shared - 1]) if shared else 0.0


def request_reuse(run: Run, joined: Joined | None, *, pools: bool) -> RunReuse:
    """Return the reuse of prompts by request: by the URLs asked, behind one URL by engines.

    `joined` is None of a watch; `pools` says that prefill and decode engines share requests.
    """
    requests = run.requests
    urls, choices = requests.endpoint_url, [run.choices.get(trace) for trace in requests.trace_id.tolist()]
    served_by = np.array([choice.endpoint if choice else "" for choice in choices], dtype=np.object_)
    if joined is not None and (joined.clock != "").any():
        served_by = joined.clock
    one_engine = len(set(served_by.tolist()) - {""}) < 2  # as far as is known
    endpoint = urls if one_engine or len(set(urls.tolist())) > 1 else served_by
    ratios = np.array([choice.expected_ratio if choice else np.nan for choice in choices], dtype=np.float64)
    blocks = [int(text) for text in run.stated("block_size", "page_size") if text.isdecimal()]
    columns: Mapping[str, Floats] | Missing
    if joined is None:
        columns = Missing("a watch sees no prompts")
    elif pools or (joined.next_place >= 0).any():
        columns = Missing("replies of a decode engine count what its prefill engine computed as cached")
    else:
        columns = reuse_by_request(requests, run.plans(), endpoint, max(blocks, default=BLOCK))
    unknown = dict.fromkeys(TOKENS, np.full(len(requests), np.nan))
    table = RequestReuse(
        served_by=served_by,
        endpoint=endpoint,
        expected_cached_tokens=ratios * np.where(requests.input_tokens > 0, requests.input_tokens, np.nan),
        **(unknown if isinstance(columns, Missing) else columns),
    )
    return RunReuse(table, columns.reason if isinstance(columns, Missing) else "")


def prefix_reuse(of: RunReuse, rows: Bools) -> PrefixReuse:
    """Return the reuse of some requests' prompts."""
    if of.missing:
        return PrefixReuse(missing=of.missing)
    reuse = of.requests
    counted = rows & np.isfinite(reuse.new_tokens)
    served = {name: counted & (reuse.endpoint == name) for name in sorted(set(reuse.endpoint.tolist()))}
    stated = counted & np.isfinite(reuse.expected_cached_tokens)
    return PrefixReuse(
        expected=ExpectedReuse(
            requests=int(stated.sum()),
            expected_tokens=round(float(reuse.expected_cached_tokens[stated].sum())),
            cached_tokens=round(float(reuse.cached_tokens[stated].sum())),
        )
        if stated.any()
        else UNSET,
        total=_summed(reuse, counted),
        endpoints={name: _summed(reuse, within) for name, within in served.items() if within.any()},
    )


def reuse_by_request(
    requests: RequestLog, plans: Iterable[PlannedRequest], endpoints: Texts, block: int = BLOCK
) -> Mapping[str, Floats] | Missing:
    """Return the columns of `EndpointReuse` for each request [n], NaN where not known."""
    ended = requests.status == "ok"
    known = ended & (requests.cached_tokens >= 0) & (requests.input_tokens > 0)
    if known.sum() < LEAST_KNOWN * max(1, ended.sum()):
        return Missing("replies do not state how many tokens of their prompts were cached")
    if known.any() and not requests.cached_tokens[known].any():
        return Missing(
            "no token of any prompt was found in a cache: it is off, or its blocks are longer than beginnings"
        )
    known &= endpoints != ""
    if known.sum() < LEAST_KNOWN * max(1, ended.sum()):
        return Missing("which of several engines served a request is not known of enough of them")
    prompts = np.where(known, requests.input_tokens, np.nan)
    pieces = pieces_of(plans, dict(zip(requests.index.tolist(), prompts.tolist(), strict=True)))
    rows = [pieces.get(index) for index in requests.index.tolist()]
    known &= np.array([row is not None for row in rows], dtype=np.bool_)
    if known.sum() < LEAST_KNOWN * max(1, ended.sum()):
        return Missing("the texts of the prompts are not in the run directory")
    prompts[~known] = np.nan
    numbers = np.unique(endpoints.astype(str), return_inverse=True)[1]
    here, anywhere = found_before(rows, numbers, requests.submit_ns, requests.first_token_ns)
    return _divided(prompts, np.maximum(requests.cached_tokens, 0), here, anywhere, block)


def _divided(prompts: Floats, cached: Ints, here: Floats, anywhere: Floats, block: int) -> Mapping[str, Floats]:
    """Return columns of tokens [n]; what could be found in whole blocks, but for the last token, is not new."""
    whole = np.maximum(prompts - 1, 0) // block * block
    could_here, could = (np.minimum(shared // block * block, whole) for shared in (here, anywhere))
    enough = cached * (1 + SLACK_RATIO) + block
    could_here, could = (np.where(each <= enough, cached, each) for each in (could_here, could))
    best_here = np.maximum(could_here, cached)
    best = np.maximum(could, best_here)
    return {
        "prompt_tokens": prompts,
        "cached_tokens": cached.astype(np.float64),
        "new_tokens": prompts - best,
        "elsewhere_tokens": best - best_here,
        "evicted_tokens": best_here - cached,
    }


def _summed(reuse: RequestReuse, rows: Bools) -> EndpointReuse:
    return EndpointReuse(
        requests=int(rows.sum()), **{name: round(float(getattr(reuse, name)[rows].sum())) for name in TOKENS}
    )
