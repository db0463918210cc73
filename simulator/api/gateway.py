"""Gateway between clients and the engine: guardrails that delay, refuse and hold back, and a limit.

The same in real and in virtual time: everything here returns durations, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sidelight.simulator.api.requests import RefusedError
from sidelight.simulator.engine.replies import reply_key
from sidelight.simulator.settings import GatewaySettings

_MOST_KEY = 1 << 64
_ALL = 1 << 62


class SimulatedGateway:
    """The gateway's guardrails and its count of requests in flight."""

    def __init__(self, settings: GatewaySettings, seed: int) -> None:
        self.settings = settings
        self._seed = seed
        self._in_flight = 0

    def admit(self) -> None:
        """Count a request in; `leave` counts it out. Raises RefusedError (503) where there are too many."""
        limit = self.settings.fail_above
        if limit is not None and self._in_flight >= limit:
            message = f"The server is overloaded: {limit} requests are in flight. Please try again later."
            raise RefusedError(503, message, kind="ServiceUnavailableError")
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in for as long as the block lasts. Raises RefusedError as `admit` does."""
        self.admit()
        try:
            yield
        finally:
            self.leave()

    def input_s(self, prompt_tokens: int) -> float:
        """Return the duration of the guardrail's check of a prompt."""
        return self.settings.input_s + self.settings.input_token_s * prompt_tokens

    def check(self, prompt_token_ids: Sequence[int]) -> None:
        """Raise RefusedError (400) for a prompt that the guardrail refuses, as a content filter does."""
        ratio = self.settings.refuse_ratio
        if ratio and reply_key(self._seed, prompt_token_ids) < ratio * _MOST_KEY:
            message = "The prompt was refused by the content filter. Please modify your prompt and retry."
            raise RefusedError(400, message, kind="content_filter", param="prompt")

    def hold(self, *, streamed: bool) -> tuple[int, float] | None:
        """Return the number of tokens held back at a time, and the duration. Of a reply in one piece all are."""
        tokens = self.settings.hold_tokens
        return (tokens if streamed else _ALL, self.settings.hold_s) if tokens else None


#: What lets everything pass at once.
OPEN = SimulatedGateway(GatewaySettings(), 0)
