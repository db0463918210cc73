"""True records of every request and step, kept in memory and written as JSON lines.

One line a request, written when it finishes or is aborted, and in a file of its own one line a step of the engine;
docs/reference/simulator.md has the fields.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Self, TextIO

import msgspec

from sidelight.rundir.files import open_private
from sidelight.simulator.engine.history import RequestRecord, StepOutcome

KEPT_RECORDS = 100_000


class TruthLog:
    """The newest true records, and the optional truth file; a context manager that owns the file.

    `records` holds the last KEPT_RECORDS records, oldest first. A file that is there is continued: an engine that
    restarts forgets what it counted, but not what was true.
    """

    def __init__(self, path: Path | None, steps_path: Path | None = None) -> None:
        """Open the files to append to them. Raises OSError."""
        self.records: deque[RequestRecord] = deque(maxlen=KEPT_RECORDS)
        self._file, self._steps = opened(path), opened(steps_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._file, self._steps):
            if file is not None:
                file.close()

    def add_step(self, outcome: StepOutcome) -> None:
        if self._steps is not None and (outcome.prefill.requests or outcome.decode_requests):
            self._steps.write(step_line(outcome))

    def add(self, record: RequestRecord) -> None:
        self.records.append(replace(record, steps=()) if record.steps else record)
        if self._file is not None:
            self._file.write(line(record))


def opened(path: Path | None) -> TextIO | None:
    """Return a truth file, opened to append to it; None without one. Raises OSError."""
    if path is None:
        return None
    # Line-buffered: a killed simulator leaves every finished record on disk.
    return os.fdopen(open_private(path, os.O_APPEND), "a", buffering=1, encoding="utf-8")


def step_line(outcome: StepOutcome) -> str:
    """Return a step as one line of JSON, its line feed included."""
    fields = {
        "kind": outcome.kind,
        "begin_ns": outcome.begin_ns,
        "end_ns": outcome.at_ns,
        "sequences": outcome.prefill.requests + outcome.decode_requests,
        "prefills": outcome.prefill.requests,
        "prefill_tokens": outcome.prefill.computed_tokens,
        "computed": dict(outcome.computed),
    }
    return msgspec.json.encode(fields).decode() + "\n"


def line(record: RequestRecord) -> str:
    """Return a record as one line of JSON, its line feed included."""
    before_abort = ("queued_ns", "scheduled_ns", "first_token_ns")
    fields = {
        # Behind the prefix: chatcmpl-a-b gives a-b.
        "request_id": record.client_id or record.request_id.partition("-")[2],
        "response_id": record.request_id,
        "arrival_ns": record.arrival_ns,
        "dispatched_ns": record.dispatched_ns,
        **{name: stamp if (stamp := getattr(record, name)) >= 0 else None for name in before_abort},
        "finished_ns": record.finished_ns,
        "tokens": record.output_tokens,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "preemptions": record.preemptions,
        "lost_tokens": record.lost_tokens,
        "recovered": record.recovered,
        "role": record.role,
    }
    if record.host_tokens:
        fields["host_cached_tokens"] = record.host_tokens
    if record.adapter:
        fields["adapter"] = record.adapter
    if record.accepted:
        drafts = sum(record.accepted)
        fields |= {
            "drafts": drafts,
            "draft_tokens": record.draft_tokens,
            "draft_tokens_accepted": record.accepted_tokens,
        }
    if record.meeting is not None:
        fields |= {
            "bootstrap_room": record.meeting.number,
            **{name: getattr(record.meeting, name) for name in ("begun_ns", "opened_ns", "send_ns")},
        }
    elif record.load_ns >= 0:
        fields |= {name: getattr(record, name) for name in ("load_ns", "loaded_ns", "loaded_tokens")}
    return msgspec.json.encode(fields).decode() + "\n"
