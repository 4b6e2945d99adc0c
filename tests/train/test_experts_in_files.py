"""What only files of models with experts have: biases of gates, and layers after the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_folders import save_tiny
from safetensors.torch import load_file, save_file

from shoal.train.exporting import export_hf
from shoal.train.importing import import_hf


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_the_bias_of_a_gate_stays_exact_and_layers_after_the_last_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_tiny("deepseek3", tmp_path / "hf")
    bias, further = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.eh_proj.weight"
    file = tmp_path / "hf" / "model.safetensors"
    before = load_file(file)
    save_file({**before, further: torch.ones(24, 48)}, file, {"format": "pt"})
    import_hf(tmp_path / "hf", tmp_path / "in", quiet)
    export_hf(tmp_path / "in", tmp_path / "out", quiet, dtype="bfloat16")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert [name for name, tensor in after.items() if tensor.dtype != torch.bfloat16] == [bias]
    assert torch.equal(after[bias], before[bias])
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["num_nextn_predict_layers"] == 0
