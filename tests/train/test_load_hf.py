"""A Hugging Face folder straight into what the ranks of a layout hold, and no more of it than that."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Held, put_together, weights
from hf_folders import TINY, edit_json, save_tiny, write_llama

import shoal
from shoal.comm.world import World
from shoal.errors import CheckpointError, ConfigError, LayoutError
from shoal.layout import Layout
from shoal.meter import Meter
from shoal.model.hf import Weights
from shoal.train.pool import Pool

LAYOUTS = ("dp=2,zero=3", "tp=2", "tp=2:1d-sp,pp=2:1f1b,mb=4", "dp=2,pp=2,zero=1", "dp=3,zero=2")
MODELS = ("llama3", "qwen3", "gemma", "gpt2", "gpt2-untied", "olmoe", "deepseek3")
SMALL = 4096
"""Bytes of scalars, and of what ranks tell each other."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("folders")
    for name in MODELS:
        save_tiny(name, root / name)
    return root


def loaded(world: World, folder: Path, line: str) -> list[Held]:
    return weights(shoal.load_hf(folder, line, world=world))


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_any_layout_holds_what_the_folder_has(pool: Pool, folders: Path, name: str, line: str) -> None:
    ranks = pool.run(loaded, folders / name, line, ranks=Layout.parse(line).ranks)
    full = put_together(ranks)
    stored = Weights(folders / name)
    assert set(full) == set(stored.shapes)
    for key, shape in stored.shapes.items():
        assert torch.equal(full[key], stored.read(key, tuple((0, n) for n in shape)).double()), key


def test_the_face_takes_a_layout_in_words_and_casts_to_its_dtype(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    engine, stored = shoal.load_hf(folder, "dp=1,dtype=bf16", optimizer=shoal.Optimizer(lr=1e-4)), Weights(folder)
    assert engine.optimizer.lr == 1e-4
    norm = stored.read("head.norm.weight", ((0, 8),))
    (master,) = [
        one.tensor for one in engine.fragments() if (one.kind, one.piece.name) == ("weight", "head.norm.weight")
    ]
    assert torch.equal(master, norm), "what the optimizer works on is as exact as what is stored"
    assert torch.equal(engine.task.module.get_parameter("head.norm.weight"), norm.bfloat16())


def measured(world: World, folder: Path, line: str) -> tuple[int, int, int, int]:
    """Bytes read, bytes of what this rank holds as it is stored, the most that reading held beside the engine, and the
    largest tensor that the rank has a part of."""
    engine, one, total = shoal.load_hf(folder, line, world=world), Weights.read, 0
    held = [fragment for fragment in engine.fragments() if fragment.kind == "weight"]

    def counting(self: Weights, *box: Any) -> torch.Tensor:
        nonlocal total
        with meter.phase("reading"):
            tensor = one(self, *box)
        total += tensor.nbytes
        return tensor

    Weights.read = counting  # type: ignore[method-assign]
    try:
        with Meter() as meter:
            meter.label("engine", [fragment.tensor for fragment in engine.fragments()])
            before = meter.live()
            engine.load(folder, states=False)
            extra = meter.peak("reading") - before
    finally:
        Weights.read = one  # type: ignore[method-assign]
    word = torch.float32.itemsize
    share = sum(fragment.tensor.numel() for fragment in held) * word
    return total, share, extra, max(prod(fragment.piece.shape) for fragment in held) * word


@pytest.mark.parametrize("line", ["dp=1", *LAYOUTS])
def test_a_rank_reads_its_share_and_holds_one_tensor_beside_it(pool: Pool, folders: Path, line: str) -> None:
    for read, share, extra, tensor in pool.run(measured, folders / "gpt2", line, ranks=Layout.parse(line).ranks):
        assert read == share
        assert 0 < extra <= tensor + SMALL


def refusal(world: World, folder: Path, line: str) -> tuple[str, str]:
    try:
        shoal.load_hf(folder, line, world=world)
    except (CheckpointError, ConfigError, LayoutError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_a_fault_of_the_folder_stops_all_ranks_with_one_message(pool: Pool, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    edit_json(folder / "config.json", intermediate_size=12)
    told = pool.run(refusal, folder, "tp=2", ranks=2)
    assert told[0] == told[1]
    assert told[0][0] == "CheckpointError"
    assert "mlp" in told[0][1]
    edit_json(folder / "config.json", intermediate_size=11)
    assert pool.run(refusal, folder, "tp=3", ranks=3)[0][0] == "LayoutError"
    edit_json(folder / "config.json", model_type="bert")
    assert pool.run(refusal, folder, "tp=2", ranks=2)[0][0] == "ConfigError"


def load_with_states(world: World, folder: Path) -> None:
    shoal.load_hf(folder, "dp=1", world=world).load(folder)


def test_a_folder_has_no_optimizer_states(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="load it with states=False"):
        pool.run(load_with_states, write_llama(tmp_path / "model"), ranks=1)


def test_every_family_is_among_the_tiny_models() -> None:
    from shoal.model.hf import FAMILIES

    assert {tiny.family for tiny in TINY.values()} == set(FAMILIES)
