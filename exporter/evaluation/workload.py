"""Workload of a recorded run: what was sent, in whose tokens."""

from __future__ import annotations

import msgspec

from exporter.summary.result import Tokenizer, Workload
from recorded.run import Run


def workload(run: Run) -> Workload:
    """Return the summary of the workload: its requests, its tokenizer and the number of clipped lengths."""
    planned = {event.data["phase"]: event.data for event in run.events if event.name == "planned"}
    measure, manifest = planned.get("measure", {}), run.manifest
    return Workload(
        name=manifest.get("workload", {}).get("label") or manifest["config"].get("workload"),
        seed=manifest["config"].get("seed"),
        tokenizer=msgspec.convert(manifest.get("tokenizer"), Tokenizer | None),
        max_model_len=manifest.get("target", {}).get("max_model_len"),
        planned_requests=measure.get("count"),
        clipped_inputs=measure.get("clipped_inputs"),
        clipped_outputs=measure.get("clipped_outputs"),
        requests_sha256=measure.get("sha256"),
        dropped_turns=measure.get("dropped_turns"),
        missed_lengths=measure.get("missed_lengths"),
        stated=manifest.get("workload"),
        shares_prefixes=_shares_prefixes(run),
        warmup_requests=int((run.requests.phase == "warmup").sum()),
    )


def _shares_prefixes(run: Run) -> bool | None:
    """Return whether requests were meant to share prefixes: sessions, system prompts, repositories."""
    if not len(run.requests):
        return None
    classes = (run.manifest.get("workload") or {}).get("classes", ())
    shared = any(traffic_class.get("system_prompt") or traffic_class.get("shared_prefix") for traffic_class in classes)
    return bool(shared or (run.requests.session >= 0).any())
