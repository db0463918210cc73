"""What a report states of how tokens are counted."""

from __future__ import annotations


def special_tokens(*, exact: bool) -> dict[str, str]:
    """What a report states of BOS and EOS, system prompt and tool tokens (draft, special token handling).

    exact  input lengths were verified after the chat template
    """
    inputs = "included in the declared input length, which was verified after the chat template"
    plain = "excluded from the declared input length; included in the server's usage where it counts them"
    return {
        "bos_eos_input": inputs if exact else plain,
        "eos_output": "as the server's usage counts it; a tokenizer's count of the text excludes it",
        "system_prompt": "included in the input length, not counted separately",
        "chat_template": inputs if exact else plain,
        "tools": "no tools are declared in requests; a reply's tool calls count as the server's usage has them",
    }
