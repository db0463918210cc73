"""A hook of LiteLLM's proxy that holds each call back by HOLD_MS; LiteLLM imports it as `hold.hold`."""

import asyncio
import os
from typing import Any

from litellm.integrations.custom_logger import CustomLogger


class Hold(CustomLogger):
    async def async_pre_call_hook(self, *, data: dict[str, Any], **_: object) -> dict[str, Any]:
        await asyncio.sleep(float(os.environ["HOLD_MS"]) / 1e3)
        return data


hold = Hold()
