"""Weights of a Hugging Face folder: what is read, and what is refused before anything is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_folders import LLAMA_NAMES, edit_json, shard, write_llama
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import CheckpointError, ShoalError
from shoal.model.hf import Weights, end_tokens
from shoal.placement import Box

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def whole(weights: Weights, name: str) -> Box:
    return tuple((0, n) for n in weights.shapes[name])


def test_every_tensor_by_its_logical_name(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    weights = Weights(folder)
    assert set(weights.shapes) == set(LLAMA_NAMES)
    for name, theirs in LLAMA_NAMES.items():
        assert torch.equal(weights.read(name, whole(weights, name)), stored[theirs])
        assert weights.dtypes[name] == torch.float32
    block = weights.read("blocks.0.ffn.up.weight", ((3, 7), (1, 6)))
    assert torch.equal(block, stored[UP][3:7, 1:6])


def test_several_files_are_one_model(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    shard(folder)
    weights = Weights(folder)
    for name, theirs in LLAMA_NAMES.items():
        assert torch.equal(weights.read(name, whole(weights, name)), stored[theirs])


def test_a_model_saved_without_its_prefix_and_with_tables(folder: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return {**short, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    change(folder, rename)
    weights = Weights(folder)
    assert set(weights.shapes) == set(LLAMA_NAMES)
    assert weights.read("head.norm.weight", ((0, 8),)).shape == (8,)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_stored_too_must_be_the_embedding(folder: Path, same: bool) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    if same:
        change(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    weights = Weights(folder)
    assert "head.out.weight" not in weights.shapes
    if same:
        weights.check_tied()
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*lm_head\.weight differs"):
            weights.check_tied()


def test_links_in_the_cache_of_their_tools_are_followed_and_others_are_not(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert Weights(snapshot).shapes
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in blobs.iterdir():
        (elsewhere / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="a link out of the folder"):
        Weights(elsewhere)


@pytest.mark.parametrize(
    "outside", ["../model.safetensors", "/etc/model.safetensors", "a/../b.safetensors", "x.bin", ""]
)
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, outside: str) -> None:
    shard(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    index["weight_map"][UP] = outside
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no plain name of a safetensors file"):
        Weights(folder)


def change(folder: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(how(load_file(path)), path)


def lacks_a_tensor(folder: Path) -> None:
    change(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != UP})


def has_one_more(folder: Path) -> None:
    change(folder, lambda tensors: tensors | {"model.layers.0.mlp.extra.weight": torch.ones(3)})


def has_another_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors | {UP: torch.ones(9, 8)})


def has_whole_numbers(folder: Path) -> None:
    change(folder, lambda tensors: tensors | {UP: torch.ones(11, 8, dtype=torch.int8)})


def is_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 40)


def is_cut_in_its_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 60)


def is_empty(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def is_noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"{" * 400)


def is_gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def is_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lacks_a_file(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def is_indexed_wrongly(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_bytes())["weight_map"]
    files[UP] = next(file for file in files.values() if file != files[UP])
    edit_json(index, weight_map=files)


def is_indexed_in_part(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_bytes())["weight_map"]
    edit_json(index, weight_map={name: file for name, file in files.items() if name != UP})


def has_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def has_a_billion_layers(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10**9)


def has_huge_sizes(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=10**30)


def has_sizes_whose_product_is_huge(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=2**40, hidden_size=2**40)


def has_a_list_for_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lacks_a_tensor, (UP, "[11, 8] is missing")),
        (has_one_more, ("model.safetensors", "model.layers.0.mlp.extra.weight [3] has no place")),
        (has_another_shape, ("model.safetensors", UP, "[9, 8]", "[11, 8]")),
        (has_whole_numbers, ("model.safetensors", UP, "I8")),
        (is_cut, ("model.safetensors", "truncated", "model.", ".weight ends at byte")),
        (is_cut_in_its_header, ("model.safetensors", "truncated")),
        (is_empty, ("model.safetensors", "truncated")),
        (is_noise, ("model.safetensors", "header")),
        (is_gone, ("neither model.safetensors nor model.safetensors.index.json",)),
        (is_pickled, ("pickles", "run code")),
        (lacks_a_file, ("model-00002-of-00002.safetensors", "no such file")),
        (is_indexed_wrongly, (UP, "is not in it")),
        (is_indexed_in_part, (UP, "does not say so")),
        (has_no_config, ("config.json", "cannot be read")),
        (has_a_billion_layers, ("12 tensors are not the 1000000000 layers",)),
        (has_huge_sizes, ("config.json", "sizes that no tensor can have")),
        (has_sizes_whose_product_is_huge, ("config.json", "sizes that no tensor can have")),
        (has_a_list_for_config, ("config.json", "not a JSON object")),
    ],
)
def test_what_is_damaged_or_does_not_fit_is_named(
    folder: Path, harm: Callable[[Path], None], named: tuple[str, ...]
) -> None:
    harm(folder)
    with pytest.raises(ShoalError) as refused:
        Weights(folder)
    for word in named:
        assert word in str(refused.value)


def test_the_tokens_that_end_a_text(folder: Path) -> None:
    assert end_tokens(folder) == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert end_tokens(folder) == {5, 7}
    (folder / "generation_config.json").write_text("{}")
    edit_json(folder / "config.json", eos_token_id=None)
    assert end_tokens(folder) == frozenset()
