"""Positions, masks and caches: what a layer is told is what a person would work out by hand."""

from __future__ import annotations

from math import ceil, cos, floor, log, pi, sin

import pytest
import torch
from families import logits, model_of
from torch import Tensor

from shoal.config import RopeScaling
from shoal.errors import ConfigError
from shoal.model.context import Cache, attention_mask
from shoal.model.rope import rope_tables

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])


# ---- where attention looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-text", "documents"])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_a_position_sees_those_of_its_document_and_window_up_to_itself(
    documents: Tensor | None, window: int | None
) -> None:
    mask = attention_mask(torch.zeros(2, 7), documents, window)
    if documents is None and window is None:
        assert mask is None
        return
    assert mask is not None
    for sample, now, past in torch.cartesian_prod(torch.arange(2), torch.arange(7), torch.arange(7)).tolist():
        sees = past <= now and (window is None or now - past < window)
        sees = sees and (documents is None or bool(documents[sample, now] == documents[sample, past]))
        assert mask.expand(2, 1, 7, 7)[sample, 0, now, past] == sees


@pytest.mark.parametrize("window", [7, 100])
def test_a_window_as_long_as_the_text_leaves_attention_its_quick_path(window: int) -> None:
    assert attention_mask(torch.zeros(2, 7), None, window) is None


# ---- decoding ----------------------------------------------------------------------------------------------


def test_a_cache_keeps_no_more_than_the_window() -> None:
    model, cache = model_of("mistral"), Cache()
    for length in (9, 1, 1):
        model.decode(torch.zeros(1, length, dtype=torch.int64), cache)
        assert {k.shape[2] for k, _ in cache.kept.values()} == {4}, "of a window of five, one is yet to come"
    assert cache.length == 11


def test_a_text_longer_than_the_learned_positions_is_refused_before_it_is_read() -> None:
    model, cache = model_of("gpt2"), Cache()
    problem = "model.max_positions = 19: the model has learned no position for a text of 20 tokens; use a shorter text"
    with pytest.raises(ConfigError, match=problem):
        logits(model, torch.zeros(1, 20, dtype=torch.int64))
    model.decode(torch.zeros(1, 18, dtype=torch.int64), cache)
    model.decode(torch.zeros(1, 1, dtype=torch.int64), cache)
    with pytest.raises(ConfigError, match=problem):
        model.decode(torch.zeros(1, 1, dtype=torch.int64), cache)
    logits(model_of("llama2"), torch.zeros(1, 20, dtype=torch.int64))


# ---- rotary angles -----------------------------------------------------------------------------------------


def slowed(frequency: float, scaling: RopeScaling) -> float:
    """As Llama 3.1 was published, by wavelengths; as YaRN was, by the number of the pair, of eight at a base of 50."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "yarn":
        pair = round(-log(frequency) / log(50.0) * 8)
        ends = (16 * log(99 / (2 * pi * turns)) / (2 * log(50.0)) for turns in (scaling.beta_fast, scaling.beta_slow))
        first, last = max(0, floor(next(ends))), ceil(next(ends))
        ramp = min(1.0, max(0.0, (pair - first) / (last - first)))
        return (1 - ramp) * frequency + ramp * frequency / scaling.factor
    wavelength, original = 2 * pi / frequency, scaling.original_positions
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=3),
        RopeScaling(kind="llama3", factor=8, original_positions=99),
        RopeScaling(kind="yarn", factor=8, original_positions=99, beta_fast=9, mscale=0.9, mscale_all_dim=0.4),
    ],
)
def test_angles_are_those_of_the_formula(scaling: RopeScaling | None) -> None:
    positions = torch.tensor([[0, 1, 5, 1000]])
    found = rope_tables(positions, 16, 50.0, torch.float64, scaling)
    changed, size = 0, 1.0
    if scaling is not None and scaling.kind == "yarn":
        size = (1 + 0.09 * log(8)) / (1 + 0.04 * log(8))
    for pair in range(8):
        frequency = 50.0 ** (-2 * pair / 16)
        turning = frequency if scaling is None else slowed(frequency, scaling)
        changed += turning != frequency
        for at, position in enumerate([0, 1, 5, 1000]):
            assert found[0][0, at, 0, pair] == pytest.approx(size * cos(position * turning), abs=1e-10)
            assert found[1][0, at, 0, pair] == pytest.approx(size * sin(position * turning), abs=1e-10)
    kind = "none" if scaling is None else scaling.kind
    assert changed == {"none": 0, "linear": 8, "llama3": 5, "yarn": 6}[kind], "some stay and some do not"
