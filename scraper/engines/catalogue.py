"""The engines' YAML files as records. They say all that is known of an engine: a new engine is a new file.

A file holds the canonical quantities and the entries that provide each, what spans mean, paths to ask, and switches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

import msgspec

Kind = Literal["histogram", "gauge", "counter"]
Form = Literal["metric", "add", "mean", "less", "over"]
Tokens = Literal["prompt_tokens", "output_tokens", "computed_tokens"]
Seen = Literal["real", "recorded page", "source only"]
Labels = tuple[tuple[str, tuple[str, ...]], ...]
_TIME = {"kind": "histogram", "unit": "seconds"}
# Times that engines' spans may state of what passes before the first token, in neither queue nor prefill.
INNER_TIMES = ("scheduler_intake", "router", "kv_transfer", "decode_queue", "first_step")
_TOKENS = {"kind": "counter", "unit": "tokens"}
_REQUESTS = {"kind": "gauge", "unit": "requests", "across": "sum"}
# The canonical quantities, and what holds of each in all engines' files but where one states another unit.
QUANTITIES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("queue_time", "prefill_time", "decode_time", "inference_time", "ttft"), _TIME),
    **dict.fromkeys(("inter_token_latency", "tpot_per_request", "e2e_latency"), _TIME),
    **dict.fromkeys(("requests_running", "requests_waiting"), _REQUESTS),
    "kv_cache_usage": {"kind": "gauge", "unit": "ratio", "across": "max"},
    **dict.fromkeys(("prompt_tokens", "generation_tokens"), _TOKENS),
    "preemptions": {"kind": "counter", "unit": "preemptions"},
    **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "draft_tokens", "draft_tokens_accepted"), _TOKENS),
    "requests_finished": {"kind": "counter", "unit": "requests"},
}
_GAUGE = {"kind": "gauge", "across": "max"}
_SECONDS = {"kind": "counter", "unit": "seconds"}
_ITEMS = {"kind": "counter", "unit": "items"}
_PASSES = {"kind": "counter", "unit": "passes"}
# Quantities of what many engines run without, or do not tell: where a page shows them, else nothing is said of them.
FEATURES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("requests_waiting_capacity", "requests_waiting_deferred"), _REQUESTS),
    **dict.fromkeys(("kv_fetch_waiting_to_start", "kv_fetch_in_progress", "kv_fetch_completed_waiting"), _REQUESTS),
    "kv_transfer_time": _TIME,
    "kv_transfer_failures": {"kind": "counter", "unit": "transfers"},
    **dict.fromkeys(("prefix_cache_hits_host", "prefix_cache_hits_disk", "prefix_cache_hits_remote"), _TOKENS),
    "host_cache_usage": {**_GAUGE, "unit": "ratio"},
    "drafts": {"kind": "counter", "unit": "drafts"},
    **{f"draft_tokens_accepted_at_{place}": _TOKENS for place in (1, 2, 3, 4)},
    "acceptance_length": {**_GAUGE, "unit": "tokens"},
    "lora_usage": {**_GAUGE, "unit": "ratio"},
    **dict.fromkeys(("mm_cache_queries", "mm_cache_hits"), _ITEMS),
    "admission_rejections": {"kind": "counter", "unit": "requests"},
    **dict.fromkeys(("scheduler_idle_time", "scheduler_exposed_time"), _SECONDS),
    "iteration_time": {**_GAUGE, "unit": "seconds"},
    **dict.fromkeys(("expert_passes", "expert_balance"), _PASSES),
    **dict.fromkeys(("preprocess_time", "route_time", "router_overhead"), _TIME),
}
_PAIRS: dict[Form, tuple[str, str]] = {
    "mean": ("sum", "count"),
    "less": ("histogram", "less"),
    "over": ("gauge", "over"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way to a quantity: `names` and what to do with them.

    - metric: the one name itself.
    - add: all of them added up; a page must show every one.
    - mean: the first is a sum, the second the count of what it sums.
    - less: the first histogram's sum less the second's, over the first's count.
    - over: the first gauge divided by the second.

    `where` and `where_not` keep label sets by the values of a label; `beside` is a name that the page must show too.
    `page` names the kind of page where it is not the engine's usual one. `none_beside` is a name whose presence says
    that a counter which is not shown has counted nothing yet: the engine creates it with its first increment.
    """

    form: Form
    names: tuple[str, ...]
    where: tuple[Labels, ...]
    where_not: Labels
    beside: str
    none_beside: str
    page: str
    since: str
    until: str
    note: str
    replaces: tuple[tuple[str, str], ...]

    def text(self, exposed: dict[str, str] | None = None) -> str:
        """Return the entry as a formula, with the page's own names where `exposed` has them."""
        shown = [
            (exposed or {}).get(name, name) + _selector(where, self.where_not)
            for name, where in zip(self.names, self.where, strict=True)
        ]
        return {"metric": "", "add": " + ", "mean": " / ", "less": " - ", "over": " / "}[self.form].join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueQuantity:
    """One canonical quantity of one engine: `metrics` are the ways to it in the order in which they are tried.

    `observed` is the moment at which the engine records a value, `across` how label sets and endpoints combine.
    `absent` says why the engine does not tell it, `enable` the switch without which it does not.
    """

    name: str
    kind: Kind
    unit: str
    observed: str = ""
    across: Literal["sum", "max"] = "sum"
    meaning: str = ""
    metrics: tuple[Entry, ...]
    absent: str = ""
    enable: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which an engine reports single requests' times, and its switch.

    It does not apply to a version with `not_of` in its text.
    """

    name: str
    gives: str
    enable: str
    not_of: str = ""


class SpanMatch(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that identify a span; an empty field sets none, and all set must hold.

    They are the span's name, the beginning of its scope's name, its kind, attributes it has, attributes with their
    values.
    """

    name: str = ""
    scope: str = ""
    kind: Literal["", "internal", "server", "client"] = ""
    attributes: tuple[str, ...] = ()
    values: dict[str, str] = {}


class SpanTime(msgspec.Struct, frozen=True, kw_only=True):
    """One way to a time: an attribute (s, or a text such as 1.2ms), `less` another of the times; or from where the
    first of the `begin` spans under the request's begins to where the next `end` span ends; or what lies between two
    stages, from where the first `after` span ends to where the first `until` span begins; or the `sum` of how long the
    first of each of some stages lasted; or how long the request's own span `lasts`, where it has attributes with these
    values.
    """

    attribute: str = ""
    less: str = ""
    begin: tuple[str, ...] = ()
    end: str = ""
    after: str = ""
    until: str = ""
    sum: tuple[str, ...] = ()
    lasts: dict[str, str] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the names of the spans that it is read from."""
        return tuple(name for name in (*self.begin, self.end, self.after, self.until, *self.sum) if name)


class SpanRole(msgspec.Struct, frozen=True, kw_only=True):
    """Signs of an engine's part in a request that two shared: any one of them.

    They are attributes with their values, or a stage under the request's span. That of a prefill may also be what a
    client asked for itself: it counts where another engine went on.
    """

    values: dict[str, str | float] = {}
    stages: tuple[str, ...] = ()


class EngineSpanRules(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's spans of requests: any of `match` is the request's span, `times` are tried in their order.

    `request_id` is the attribute with the engine's id; `ids` are the forms it takes of the client's ids: {response} is
    the id in the reply, {request} the X-Request-Id, {n} the number of the prompt. `probe_ids` is how the engine's ids
    of health probes begin, which it serves like requests. `step_id` is the form of the ids of a request's steps, where
    they have spans of their own: {step} is of the step alone, {n} of what runs within it. `roles` are the signs by
    which the spans of a request that two engines shared are distinguished.
    """

    match: tuple[SpanMatch, ...]
    request_id: str = ""
    ids: tuple[str, ...] = ()
    probe_ids: str = ""
    step_id: str = ""
    times: dict[str, tuple[SpanTime, ...]] = {}
    roles: dict[Literal["prefill", "decode"], SpanRole] = {}

    @property
    def is_undivided(self) -> bool:
        """Return whether a prefill is a whole span, with its queue in it."""
        return any(way.lasts for way in self.times.get("prefill", ()))

    def request_of_step(self, text: str) -> str:
        """Return the request's id from a step's id, "" if it is not a step's."""
        match = _steps(self.step_id).fullmatch(text) if self.step_id else None
        return match["request"] if match else ""


@cache
def _steps(form: str) -> re.Pattern[str]:
    parts = {"{request}": "(?P<request>.+)", "{step}": "[^-]+", "{n}": r"\d+"}
    return re.compile("".join(parts.get(text, re.escape(text)) for text in re.split(r"(\{\w+\})", form)))


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's options that bound requests, caches, adapters and its scheduler."""

    running: str = ""
    kv_cache: str = ""
    balance: str = ""
    adapters: str = ""
    queue: str = ""
    host_cache: str = ""
    experts: str = ""
    scheduler: str = ""


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Names and labels of a server's metrics.

    - `aliases` are prefixes seen instead of `prefix`.
    - `ranks` and `totals` are labels: of label sets that differ in ranks only the lowest counts, and where there
      are ranks an empty total stands for those that split it.
    - `data_parallel` is the label of ranks that serve requests of their own, which add up.
    - `role` is the label with the role of an engine that shares requests: prefill or decode.
    - `absent` says why quantities are missing that the file does not list.
    """

    prefix: str
    aliases: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()
    data_parallel: str = ""
    role: str = ""
    quantities: dict[str, CatalogueQuantity]
    absent: str

    def normalised(self, name: str) -> str:
        """Return an exposed name with the server's own prefix in place of an alias."""
        for alias in self.aliases:
            if name.startswith(alias):
                return self.prefix + name[len(alias) :]
        return name


class Catalogue(Names, frozen=True, kw_only=True):
    """The catalogue entry of one engine.

    - `order`: a page or a span is tried for engines of a lower one first.
    - `shared` are names that servers of other engines show as well.
    - `end_tokens` are histograms of a request's tokens, observed as it ends: of the prompt, of the output, and of the
      prompt without what was cached.
    - `version_paths` are asked for a JSON object whose `version` is the engine's.
    - `seen` is what all this was compared with, `seen_as` which server or pages that were.
    - `probe_path` tells whether the engine is up, where asking its usual path for that costs a request.
    - `unasked_openmetrics`: the frontend, as in its version, of pages in OpenMetrics, though plain text was preferred.
    - `frontend`: it stands before engines and is none itself: what it counts stands in for what theirs do not.
    """

    name: str = msgspec.field(name="engine")
    order: int
    title: str
    pages: tuple[str, ...]
    version_paths: tuple[str, ...] = ()
    probe_path: str = ""
    versions: str
    seen: Seen
    seen_as: str
    enable: str
    absent: str = "not exposed"
    limits: EngineLimits = EngineLimits()
    notes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    end_tokens: dict[Tokens, str] = {}
    timing: tuple[Timing, ...]
    spans: EngineSpanRules | None = None
    frontend: bool = False
    unasked_openmetrics: str = ""

    def version_of(self, stated: str, content_type: str) -> str:
        """Return the stated version with the frontend that a page's type shows."""
        frontend = self.unasked_openmetrics
        if not content_type.lower().startswith("application/openmetrics-text") or frontend in stated:
            return stated
        return f"{stated} ({frontend})" if stated else frontend

    def ways(self, version: str | None) -> tuple[Timing, ...]:
        """Return the ways in which a version tells the times of requests; None: in any version."""
        return tuple(way for way in self.timing if not way.not_of or way.not_of not in (version or ""))

    def spans_switch(self, version: str | None) -> str | None:
        """Return the option with which a version sends spans; None where it sends none."""
        return next((way.enable for way in self.ways(version) if way.name.startswith("spans")), None)

    def tracing(self, version: str | None) -> str:
        """Return the switch for spans with the engine's name; the other way of a version that sends none."""
        if (enable := self.spans_switch(version)) is not None:
            return f"{self.title}: {enable}"
        ways = self.ways(version)
        named = f"{self.title} {version}" if len(ways) < len(self.timing) else self.title
        return f"{named} sends no spans; its {ways[0].name} give {ways[0].gives}: {ways[0].enable}"


Known = TypeVar("Known", bound=Names)


@cache
def engine_names() -> tuple[str, ...]:
    """Return the engines by their `order`."""
    return tuple(sorted(names_in("sidelight.scraper.engines"), key=lambda name: (_read(name).order, name)))


def metrics_paths() -> tuple[str, ...]:
    """Return the paths of the engines' metrics pages, in the order of trial.

    It is the order in which an unknown server is asked for them.

    The longest first: `/metrics` of trtllm-serve hands out its iterations once, to its first reader.
    """
    paths = {path for name in engine_names() for path in catalogue(name).pages}
    return tuple(sorted(paths, key=lambda path: (-len(path), path)))


def version_paths() -> tuple[str, ...]:
    """Return the paths that may tell an engine's version, those of most engines first."""
    counts = Counter(path for name in engine_names() for path in catalogue(name).version_paths)
    return tuple(path for path, _ in counts.most_common())


def catalogue(engine: str) -> Catalogue:
    """Return the catalogue entry of an engine, from its YAML. Raises ValueError for one not in `engine_names`."""
    if engine not in engine_names():
        raise ValueError(f"no engine {engine}; known: {', '.join(engine_names())}")
    return _read(engine)


@cache
def _read(engine: str) -> Catalogue:
    return read_yaml("sidelight.scraper.engines", engine, Catalogue, QUANTITIES | FEATURES)


def names_in(package: str) -> list[str]:
    """Return the names of the YAML files in a package, without their suffix."""
    files = (path.name for path in resources.files(package).iterdir())
    return [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]


def read_yaml(package: str, name: str, kind: type[Known], common: Mapping[str, Mapping[str, Any]]) -> Known:
    """Return a YAML file of a package as its Struct.

    `common` are the quantities, each with what holds of it in all files; one that a file does not list is absent.
    """
    import yaml  # noqa: PLC0415  15 ms, before a run may begin

    text = resources.files(package).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    # libyaml's loader takes a millisecond a file, the one in Python ten.
    table: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are
    if unknown := table["quantities"].keys() - common.keys():
        raise ValueError(f"{package}: {name}.yaml: quantities: {', '.join(sorted(unknown))}: no such quantity")
    table["quantities"] = {
        name: CatalogueQuantity(
            name=name, **{**common.get(name, {}), **fields, "metrics": tuple(map(_entry, fields.get("metrics", ())))}
        )
        for name, fields in table["quantities"].items()
    }
    known = msgspec.convert(table, kind)
    unlisted = {
        name: CatalogueQuantity(name=name, metrics=(), absent=known.absent, **fields)
        for name, fields in common.items()
        if name not in known.quantities
    }
    return msgspec.structs.replace(known, quantities={**known.quantities, **unlisted})


@cache
def own_names(engine: str) -> dict[str, str]:
    """Return the names that identify an engine, each with its kind of page.

    The kind is empty for the usual page. The names are all those in an entry of its quantities but those that other
    servers show too.
    """
    known = catalogue(engine)
    entries = [entry for quantity in known.quantities.values() for entry in quantity.metrics]
    return {name: entry.page for entry in entries for name in entry.names if name not in known.shared}


def _entry(table: dict[str, Any]) -> Entry:
    form, names = _form(table)
    where = _labels(table.get("where", {}))
    other = _labels(table["where_other"]) if "where_other" in table else where
    return Entry(
        form=form,
        names=names,
        where=(where, *(other for _ in names[1:])),
        where_not=_labels(table.get("where_not", {})),
        **{key: table.get(key, "") for key in ("beside", "none_beside", "page", "since", "until", "note")},
        replaces=tuple((key, table[key]) for key in ("unit", "observed", "meaning") if key in table),
    )


def _form(table: dict[str, Any]) -> tuple[Form, tuple[str, ...]]:
    for form, keys in _PAIRS.items():
        if keys[0] in table:
            return form, (table[keys[0]], table[keys[1]])
    return ("add", tuple(table["add"])) if "add" in table else ("metric", (table["metric"],))


def _labels(table: dict[str, str | list[str]]) -> Labels:
    return tuple((label, (value,) if isinstance(value, str) else tuple(value)) for label, value in table.items())


def _selector(where: Labels, where_not: Labels) -> str:
    parts = [_matcher(label, values, "=") for label, values in where]
    parts += [_matcher(label, values, "!") for label, values in where_not]
    return f"{{{','.join(parts)}}}" if parts else ""


def _matcher(label: str, values: tuple[str, ...], sign: str) -> str:
    if len(values) > 1:
        return f'{label}{sign}~"{"|".join(values)}"'
    return f'{label}{"=" if sign == "=" else "!="}"{values[0]}"'
