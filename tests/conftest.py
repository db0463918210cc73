"""Settings of all tests."""

from __future__ import annotations

import asyncio

from hypothesis import settings

# A busy machine is no failure of a law.
settings.register_profile("sidelight", deadline=None)
settings.load_profile("sidelight")

# looptime asks the policy for "the" loop around synchronous tests too, and a policy that was never told otherwise makes
# one that nobody closes: a ResourceWarning, hence an error. Told that there is none, it makes none.
asyncio.set_event_loop(None)
