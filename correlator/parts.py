"""The parts of a request's time: the one list of them.

Report, summary, tables, metrics, spans and dashboards read their names, words, looks and order here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request's time: its name in metrics and files, and what people read.

    label       where nothing is known of gateways; with a breakdown at hand, `summary.breakdown.label_of` says more
    definition  what it is, in a sentence for `summary.json` and its documentation
    column      of `breakdown.Parts`, without its unit; the name where nothing else is stated
    within      the name of the part that holds it; "" of those that add up to the whole
    error       the column of `Attribution` whose standard error is that of its estimate, "" for none; `clocks` for that
                of the clocks' offset, `hand_over` for that of two engines' clocks, `unstated` where it is not known
    by_client   the client measures it alone, without any other source
    stated      some engines' spans state it besides queue and prefill: its name is one of INNER_TIMES; what of them
                adds up to the whole is of requests that two engines shared, one for prefill and one for decoding
    cause       the part as what makes requests slow, in the midst of a sentence
    spent       where its time is spent, behind a verb; of a part within another, what is mostly in that
    cure        what helps with it where nothing was seen that explains it, without a subject
    colour      of a terminal
    glyph       its piece of a bar, for those who see no colours
    light, dark its colours in a page of the light and of the dark scheme; `board` in the dashboards, by Grafana's names
    """

    name: str
    label: str
    definition: str
    column: str = ""
    within: str = ""
    error: str = ""
    by_client: bool = False
    stated: bool = False
    cause: str = ""
    spent: str = ""
    cure: str = ""
    colour: str = ""
    glyph: str = ""
    light: str = ""
    dark: str = ""
    board: str = ""

    @property
    def words(self) -> str:
        """Return its name as `merged` and the names of spans have it."""
        return self.name.replace("_", " ")


# What the part `network` is called: it holds all that is outside the engine and in no gateway that is known.
OUTSIDE_ENGINE = "outside the engine"
NETWORK, OTHER = "network", "other"
_BEFORE_TOKEN = (
    Part(
        name=NETWORK, label=OUTSIDE_ENGINE, error="network", cause="time outside the engine",
        spent="outside engine and gateway", colour="blue", glyph="░",
        light="#0072b2", dark="#4f9fd9", board="blue",
        cure="look at what stands between client and engine; a gateway that sends spans is shown apart "
        "(docs/reference/gateways.md)",
        definition="Outside the engine: first output - submit, less the engine's own TTFT, and less `gateway_ms` where "
        "a gateway's span says how long it took. Without one, gateways and proxies are in it, and the HTTP front end "
        "of the server. Below 0 by as much as stamps are late.",
    ),
    Part(
        name="gateway", label="gateway", error="network", cause="the gateway",
        spent="in the gateway", colour="magenta", glyph="▞",
        light="#56b4e9", dark="#8fd0f5", board="light-blue",
        cure="look at the gateway first",
        definition="In gateways before the engine: the first output by the outermost's spans in the request's trace "
        "([watch.md](watch.md#which-span-is-whose)), less the engine's own TTFT. Where they do not say their first "
        "output, what passed before they called the next server. The rest is in `network_ms`.",
    ),
    Part(
        name="queue", label="queue", error="queue", cause="queueing",
        spent="in the engine's queue", colour="yellow", glyph="█",
        light="#8250c4", dark="#b48cf0", board="purple",
        cure="add a replica or send fewer requests at once; what the engine waits for shows in a longer run, or in "
        "more scrapes (--scrape-interval)",
        definition="Wait in the engine's queue, as the engine defines it ([engines.md](engines.md)).",
    ),
    Part(
        name="prefill", label="prefill", error="prefill", cause="prefill",
        spent="in prefill", colour="green", glyph="▓",
        light="#e69f00", dark="#f0b232", board="yellow",
        definition="First scheduling to first token. Where two engines shared a request: of the one that computed its "
        "prompt; of a worker of Dynamo its whole span, with its queue.",
    ),
    Part(
        name="router", label="between engines", error="hand_over", stated=True,
        cause="the way from the prefill engine to the decode engine",
        spent="between the prefill engine and the decode engine", colour="bright_blue", glyph="▚",
        light="#a3375e", dark="#ef8fb0", board="dark-red",
        cure="look at the router or proxy that calls the decode engine, and at the network between them",
        definition="Where two engines shared a request: from the end of the prefill engine's span to the arrival at "
        "the decode engine. A router's spans of its two calls bound it. What is smaller than the two clocks "
        "are known to each other stays in `network_ms`.",
    ),
    Part(
        name="kv_transfer", label="KV transfer", stated=True, cause="the KV transfer",
        spent="in the KV transfer", colour="bright_magenta", glyph="▤",
        light="#c14a09", dark="#ff9966", board="orange",
        cure="look at the connector and the network between the two engines; fewer tokens to move help: a prefix "
        "cache on the decode engine",
        definition="Where two engines shared a request: the way of the KV cache from one to the other, where an "
        "engine states it. vLLM does not: it is then in `decode_queue_ms` (loaded asynchronously, as by NIXL) or in "
        "`first_step_ms` (loaded within the step).",
    ),
    Part(
        name="decode_queue", label="decode queue", stated=True, cause="the decode engine's queue",
        spent="in the decode engine's queue", colour="bright_yellow", glyph="▇",
        light="#311b63", dark="#efe0ff", board="dark-purple",
        cure="add a decode engine or raise its limit of running requests where it is at it; else its KV transfers take "
        "the time",
        definition="Where two engines shared a request: its wait in the decode engine's queue. Of vLLM with an "
        "asynchronous load of the KV cache in it, which `kv_transfer_ms` then does not tell.",
    ),
    Part(
        name="first_step", label="first decode step", stated=True, cause="the first decode step",
        spent="in the first step of the decode engine", colour="bright_cyan", glyph="▂",
        light="#4d7c0f", dark="#a3d65c", board="dark-green",
        cure="look at the batch of the decode engine, and at a connector that loads the KV cache within the step",
        definition="Where two engines shared a request: from its first scheduling at the decode engine to the first "
        "token there; of Dynamo's workers from the prefill's end to the frontend's first output. Of vLLM with a "
        "synchronous load of the KV cache in it.",
    ),
)  # fmt: skip
# What engines' spans state of a request whose client sent no span.
ENGINE_PARTS = tuple(part for part in _BEFORE_TOKEN[2:] if not part.stated)
DECODE = Part(
    name="decode",
    label="decode",
    cause="decoding",
    spent="in decoding",
    colour="bright_green",
    glyph="─",
    light="#00805c",
    dark="#35c79a",
    board="green",
    definition="First to last token, by the engine; by the client where no source of the request states it.",
)
# What adds up to the TTFT, and to the end-to-end time.
_OTHER = Part(
    name=OTHER, label="other", error="engine_frontend", cause="the engine outside queue and prefill",
    spent="in the engine outside queue and prefill", colour="cyan", glyph="▒",
    light="#8a9099", dark="#8a9099", board="#8e8e8e",
    cure="look at the engine's API server; where `other` includes several parts, the engine's spans tell them apart "
    "(--otlp-listen HOST:PORT)",
    definition="The rest of TTFT: its own parts, and what `merged` names.",
)  # fmt: skip
_E2E_OTHER = "The rest; below 0 where the first token took longer to arrive than the last."
TTFT_PARTS = (*_BEFORE_TOKEN, _OTHER)
E2E_PARTS = (*_BEFORE_TOKEN, DECODE, replace(_OTHER, column="e2e_other", definition=_E2E_OTHER))
ENGINE_FRONTEND = Part(
    name="engine_frontend",
    label="API server",
    within=OTHER,
    error="engine_frontend",
    spent="its API server",
    board="orange",
    definition="Of `other_ms`: in the engine, but in none of its other parts (tokenising, the wait for the running "
    "step, output processing).",
)
SCHEDULER_INTAKE = Part(
    name="scheduler_intake",
    label="scheduler intake",
    within=OTHER,
    stated=True,
    spent="waiting for its scheduler to take requests in",
    board="dark-orange",
    definition="Of `other_ms`: from the engine's API process to its scheduler, which takes requests in only between "
    "two steps; before the queue. Only SGLang states it; elsewhere it is in `engine_frontend_ms`.",
)
GATEWAY_REQUEST = Part(
    name="gateway_request",
    label="before its call",
    within="gateway",
    definition="Of `gateway_ms`: before gateways called the next server, such as authentication and routing.",
)
# The most that gateways can have taken, where the first output of the outermost is not known.
GATEWAY_AT_MOST = Part(
    name="gateway_at_most",
    label="gateway at most",
    error="unstated",
    definition="Where the outermost gateway does not say its first output, the most that it can have taken, if it "
    "passed on each piece of the reply as it came: its own whole time less the engine's. What of it is not in "
    "`gateway_ms` is in `network_ms`.",
)
# What parts consist of, where that is known.
INNER_PARTS = (
    Part(
        name="request_network", label="to the engine", within=NETWORK, error="clocks",
        definition="Of `network_ms`: submission to arrival at the engine. Only where the clocks are known to each "
        "other.",
    ),
    Part(
        name="response_network", label="from the engine", within=NETWORK, error="clocks",
        definition="Of `network_ms`: the engine's first token to the client's first output. Only where the clocks are "
        "known to each other.",
    ),
    Part(
        name="round_trip", label="TCP round trip", within=NETWORK, error="unstated", by_client=True,
        definition="Of `network_ms`: one round trip of TCP to the server that was asked "
        "(`self_check.network_rtt_ms`).",
    ),
    Part(
        name="beyond_round_trip", label="proxies and HTTP", within=NETWORK, error="unstated",
        definition="Of `network_ms`: what the round trip does not explain: gateways and proxies without spans, the "
        "transfer of the prompt, HTTP on both sides.",
    ),
    GATEWAY_REQUEST,
    ENGINE_FRONTEND,
    SCHEDULER_INTAKE,
    Part(
        name="blank_output", label="blank output", within=OTHER, by_client=True,
        definition="Of `other_ms`: first output to first token; the engine generated, but nothing visible.",
    ),
)  # fmt: skip
# Those of a request that two engines shared, in their order.
SHARED_PARTS = tuple(part for part in TTFT_PARTS if part.stated)
# Those that engines' spans state besides queue and prefill.
STATED_PARTS = tuple(part for part in (*TTFT_PARTS, *INNER_PARTS) if part.stated)
# What `other` consists of by the engine's own times.
INSIDE_PARTS = (ENGINE_FRONTEND, *(part for part in INNER_PARTS if part.stated))
# Before the TTFT begins.
SEND = Part(
    name="send",
    label="send",
    by_client=True,
    definition="Submit - dispatch: connecting and sending. Before TTFT begins, in none of its parts.",
)
# What people read for a part by its name.
# Of engines whose spans tell nothing but their whole.
UNDIVIDED_LABELS = {"prefill": "prefill with its queue", "first_step": "decode to first token"}
UNDIVIDED_CAUSES = {
    "prefill": "the prefill engine with its queue",
    "first_step": "the decode engine up to its first token",
}
UNDIVIDED_SPENT = {
    "prefill": "in the prefill engine, its queue included", "first_step": "in the decode engine up to its first token",
}  # fmt: skip
LABELS = {part.name: part.label for part in (*E2E_PARTS, *INNER_PARTS, GATEWAY_AT_MOST, SEND)}
CAUSES = {part.name: part.cause for part in E2E_PARTS}
SPENT = {part.name: part.spent for part in E2E_PARTS}
