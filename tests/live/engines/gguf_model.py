"""Write the tiny model as one GGUF file; runs in llama.cpp's environment: `gguf_model.py CHECKPOINT OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def main(checkpoint: Path, out: Path) -> None:
    """Write it, with random weights and the checkpoint's tokenizer and template."""
    config = json.loads((checkpoint / "config.json").read_text())
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())
    template = json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, vocabulary, template, config)
    _add_weights(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: dict[str, Any], template: str, config: dict[str, Any]) -> None:
    ids = vocabulary["model"]["vocab"]
    special = {token["content"] for token in vocabulary["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = vocabulary["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def _add_weights(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    of_keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    matrices = {"token_embd": (config["vocab_size"], hidden), "output": (config["vocab_size"], hidden)}
    norms = ["output_norm"]
    for layer in range(config["num_hidden_layers"]):
        shapes = {"attn_q": (hidden, hidden), "attn_k": (of_keys, hidden), "attn_v": (of_keys, hidden)}
        shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
        shapes |= {"ffn_down": (hidden, wide)}
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        norms += [f"blk.{layer}.{name}" for name in ("attn_norm", "ffn_norm")]
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) / 50).astype(np.float16))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
