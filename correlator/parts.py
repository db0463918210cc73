"""The parts of a request's time: the one list of them.

Report, summary, tables, metrics, spans and dashboards read their names, words, looks and order here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request's time: its name in metrics and files, and what people read.

    label       where nothing is known of gateways; with a breakdown at hand, `summary.breakdown.label_of` says more
    column      of `breakdown.Parts`, without its unit; the name where nothing else is stated
    within      the name of the part that holds it; "" of those that add up to the whole
    error       the column of `Attribution` whose standard error is that of its estimate, "" for none; `clocks` for that
                of the clocks' offset, `unstated` where it is not known
    by_client   the client measures it alone, without any other source
    cause       the part as what makes requests slow, in the midst of a sentence
    spent       where its time is spent, behind a verb
    colour      of a terminal
    glyph       its piece of a bar, for those who see no colours
    """

    name: str
    label: str
    column: str = ""
    within: str = ""
    error: str = ""
    by_client: bool = False
    cause: str = ""
    spent: str = ""
    colour: str = ""
    glyph: str = ""

    @property
    def words(self) -> str:
        """Return its name as `merged` and the names of spans have it."""
        return self.name.replace("_", " ")


# What the part `network` is called: it holds all that is outside the engine and in no gateway that is known.
OUTSIDE_ENGINE = "outside the engine"
NETWORK = "network"
_BEFORE_TOKEN = (
    Part(
        name=NETWORK, label=OUTSIDE_ENGINE, error="network", cause="time outside the engine",
        spent="outside engine and gateway", colour="blue", glyph="░",
    ),
    Part(
        name="gateway", label="gateway", error="network", cause="the gateway",
        spent="in the gateway", colour="magenta", glyph="▞",
    ),
    Part(
        name="queue", label="queue", error="queue", cause="queueing",
        spent="in the engine's queue", colour="yellow", glyph="█",
    ),
    Part(
        name="prefill", label="prefill", error="prefill", cause="prefill",
        spent="in prefill", colour="green", glyph="▓",
    ),
)  # fmt: skip
# What engines' spans state of a request whose client sent no span.
ENGINE_PARTS = _BEFORE_TOKEN[2:]
DECODE = Part(name="decode", label="decode", cause="decoding", spent="in decoding")
# What adds up to the TTFT, and to the end-to-end time.
_OTHER = Part(
    name="other", label="other", error="engine_frontend", cause="the engine outside queue and prefill",
    spent="in the engine outside queue and prefill", colour="cyan", glyph="▒",
)  # fmt: skip
TTFT_PARTS = (*_BEFORE_TOKEN, _OTHER)
E2E_PARTS = (*_BEFORE_TOKEN, DECODE, replace(_OTHER, column="e2e_other"))
ENGINE_FRONTEND = Part(name="engine_frontend", label="API server", within="other", error="engine_frontend")
SCHEDULER_INTAKE = Part(name="scheduler_intake", label="scheduler intake", within="other")
GATEWAY_REQUEST = Part(name="gateway_request", label="before its call", within="gateway")
# The most that gateways can have taken, where the first output of the outermost is not known.
GATEWAY_AT_MOST = Part(name="gateway_at_most", label="gateway at most", error="unstated")
# What parts consist of, where that is known.
INNER_PARTS = (
    Part(name="request_network", label="to the engine", within="network", error="clocks"),
    Part(name="response_network", label="from the engine", within="network", error="clocks"),
    Part(name="round_trip", label="TCP round trip", within="network", error="unstated", by_client=True),
    Part(name="beyond_round_trip", label="proxies and HTTP", within="network", error="unstated"),
    GATEWAY_REQUEST,
    ENGINE_FRONTEND,
    SCHEDULER_INTAKE,
    Part(name="blank_output", label="blank output", within="other", by_client=True),
)
# Before the TTFT begins.
SEND = Part(name="send", label="send", by_client=True)
# What people read for a part by its name.
LABELS = {part.name: part.label for part in (*E2E_PARTS, *INNER_PARTS, GATEWAY_AT_MOST, SEND)}
CAUSES = {part.name: part.cause for part in E2E_PARTS}
SPENT = {part.name: part.spent for part in E2E_PARTS}
