"""What a child process is given."""

from __future__ import annotations

import pytest

from sidecar.processes import environment


def test_a_child_inherits_no_secret(monkeypatch: pytest.MonkeyPatch):
    """Its specification has those that it needs; who may read a process's environment is not ours to say."""
    monkeypatch.setenv("SIDELIGHT_API_KEY", "hush")
    monkeypatch.setenv("OTHER", "inherited")
    inherited = environment()
    assert ("inherited", None) == (inherited.get("OTHER"), inherited.get("SIDELIGHT_API_KEY"))
