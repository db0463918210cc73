"""How long tests wait for what must happen: a bound that only a defect reaches, however busy the machine is."""

from __future__ import annotations

BOUND_S = 300.0
