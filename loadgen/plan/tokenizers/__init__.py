"""Counting tokens, and making text of an exact token count: the draft's reference, a local file, or the server's own.

Lengths are of the text alone, unless a chat template is asked for: what it or a BOS token adds is the server's, and
shows in its `usage`.
"""

from __future__ import annotations

from typing import Any

from sidelight.loadgen.plan.tokenizers.fitting import FittedPrompt, FittingTokenizer, TokenizerError, count_text, fit
from sidelight.loadgen.plan.tokenizers.local import LocalTokenizer
from sidelight.loadgen.plan.tokenizers.reference import REFERENCE, ReferenceTokenizer, reference
from sidelight.loadgen.plan.tokenizers.server import ServerTokenizer, probe_server

__all__ = [
    "REFERENCE",
    "FittedPrompt",
    "FittingTokenizer",
    "LocalTokenizer",
    "ReferenceTokenizer",
    "ServerTokenizer",
    "TokenizerError",
    "about",
    "count_text",
    "fit",
    "probe_server",
    "reference",
]


def about(tokenizer: FittingTokenizer, *, exact: bool = False) -> dict[str, Any]:
    """Return the report's description of a declared tokenizer, as plain JSON values.

    special_tokens  of BOS and EOS, system prompt and tool tokens (draft, special token handling)
    exact           input lengths were verified after the chat template
    """
    inputs = (
        "included in the declared input length, which was verified after the chat template"
        if exact
        else "excluded from the declared input length; included in the server's usage where it counts them"
    )
    return {
        "name": tokenizer.name,
        "version": tokenizer.version,
        "vocab_size": tokenizer.vocab_size,
        "source": tokenizer.source,
        "option": tokenizer.option,
        "special_tokens": {
            "bos_eos_input": inputs,
            "eos_output": "as the server's usage counts it; a tokenizer's count of the text excludes it",
            "system_prompt": "included in the input length, not counted separately",
            "chat_template": inputs,
            "tools": "no tools are declared in requests; a reply's tool calls count as the server's usage has them",
        },
    }
