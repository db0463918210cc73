"""`Plans`: what the plans of a run say of each of its requests."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from sidelight.loadgen.records import PLAN_END, PlannedRequest, plan_end

_UNPLANNED = plan_end("")
_NUMBERS = 8  # of a row: places of phase, class and model, input_tokens, max_tokens, session, turn, bytes of the body


class Plans:
    """Planned requests without their bodies.

    They take 72 bytes each where indices ascend, as in the plan of a run.
    """

    def __init__(self) -> None:
        self._indices, self._rows = array("q"), array("q")
        self._others: dict[int, array[int]] = {}
        self._texts: list[str] = []
        self._places: dict[str, int] = {}

    def __contains__(self, index: int) -> bool:
        return self._row(index) is not None

    def add(self, request: PlannedRequest, sent_bytes: int) -> None:
        """Add a request, -1 for unknown `sent_bytes`. Of two with one index the later counts.

        Raises OverflowError for a number of more than 64 bits.
        """
        if request.index == PLAN_END:
            return
        numbers = request.input_tokens, request.max_tokens, request.session, request.turn, sent_bytes
        texts = map(self._place, (request.phase, request.workload_class, request.model))
        row = array("q", (*texts, *numbers))
        if not self._indices or request.index > self._indices[-1]:
            self._indices.append(request.index)
            self._rows.extend(row)
        else:
            self._others[request.index] = row

    def of(self, index: int) -> tuple[PlannedRequest, int]:
        """Return a request without body and turns, and its body's length. A plan's end for an unknown one."""
        if (row := self._row(index)) is None:
            return _UNPLANNED, -1
        phase, workload_class, model, input_tokens, max_tokens, session, turn, sent_bytes = row
        planned = PlannedRequest(
            index=index, phase=self._texts[phase], workload_class=self._texts[workload_class],
            input_tokens=input_tokens, max_tokens=max_tokens, session=session, turn=turn, model=self._texts[model],
        )  # fmt: skip
        return planned, sent_bytes

    def _row(self, index: int) -> array[int] | None:
        if (row := self._others.get(index)) is not None:
            return row
        place = bisect_left(self._indices, index)
        if place == len(self._indices) or self._indices[place] != index:
            return None
        return self._rows[place * _NUMBERS : (place + 1) * _NUMBERS]

    def _place(self, text: str) -> int:
        place = self._places.setdefault(text, len(self._texts))
        if place == len(self._texts):
            self._texts.append(text)
        return place
