"""A model of five million random weights for the engines: what it says does not matter, how long it takes does."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NAME = "tiny-llama"
CONTEXT_TOKENS = 2048
VOCABULARY = 2048
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TEXTS = Path(__file__).parents[3] / "docs"


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer that has read this project's documentation."""
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train([str(path) for path in sorted(_TEXTS.rglob("*.md"))], trainer)
    return vocabulary


def checkpoint(folder: Path) -> Path:
    """Write what an engine reads of a Llama beside its weights, which `--load-format dummy` makes up, and return it.

    What is there stays.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizer()
    vocabulary.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary.get_vocab_size(),
            "max_position_embeddings": CONTEXT_TOKENS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **SHAPE,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "pad_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder
