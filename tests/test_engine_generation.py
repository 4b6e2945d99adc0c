"""Text from a model under a layout is the text of the same model in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from engine_ranks import Array, Held, put_together, weights
from torch import Tensor

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine, StepResult
from shoal.layout import Layout
from shoal.model.decoder import Decoder
from shoal.model.generate import Decode, decoding, generate
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone, open_data

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"
PROMPT, TEXT = [7, 201, 33, 8, 90], 10


def logits(decode: Decode) -> Array:
    """[tokens, vocabulary] after the prompt and after each of some tokens that follow it."""
    return np.stack([decode(given).numpy() for given in (PROMPT, [3], [258], [3], [0])])


def text(decode: Decode, temperature: float = 0) -> list[int]:
    return list(generate(decode, PROMPT, tokens=TEXT, temperature=temperature))


def speak(world: World, config: Config, line: str) -> tuple[list[Held], Array, list[int], list[int], bool]:
    """What this rank holds after some steps, the logits then, the likeliest text and one that is drawn, and
    whether training goes on as it would have gone on without."""
    source = open_data(config)
    engine, silent = (make_engine(config, Layout.parse(f"{line},dtype=float64"), world) for _ in range(2))

    def step(one: Engine) -> StepResult:
        return one.step(source.batch(one.steps_done, one.mesh.coords["dp"], one.layout.dp))

    for _ in range(2):
        assert step(engine) == step(silent)
    told = weights(engine), logits(engine.decoding()), text(engine.decoding()), text(engine.decoding(), 1.0)
    return *told, step(engine) == step(silent)


def in_one_process(config: Config, full: Mapping[str, Tensor]) -> Decoder:
    """The model with the weights ``full``."""
    model = make_model(config, Layout.parse("dtype=float64"))
    for one in materialise_alone(model, seed=99):
        for fragment in one.fragments("weight", one.parameter.detach()):
            fragment.tensor.copy_(full[fragment.piece.name])
    return model


@pytest.mark.parametrize(
    ("line", "tied"),
    [
        ("dp=2", False),
        ("tp=2", False),
        ("tp=2:1d-sp", False),
        pytest.param("tp=3:1d-sp,recompute=full", True, marks=pytest.mark.parity),
        ("pp=2", False),
        pytest.param("pp=4:gpipe,mb=2", True, marks=pytest.mark.parity),
        ("dp=2,zero=3", True),
        ("dp=2,tp=2,pp=2", False),
        pytest.param("dp=2,tp=2:1d-sp,pp=2,zero=3,mb=2", True, marks=pytest.mark.parity),
    ],
)
def test_a_layout_says_what_one_process_says(line: str, tied: bool, eight: Pool) -> None:
    """Every rank hears it, and a prompt or a single position need not divide."""
    config = load(RUN, ["model.layers=4", f"model.tied={str(tied).lower()}", "data.seq_len=8", "optimizer.lr=0.5"])
    found = eight.run(speak, config, line, ranks=Layout.parse(line).ranks)
    model = in_one_process(config, put_together(held for held, *_ in found))
    expected, likeliest, drawn = logits(decoding(model)), text(decoding(model)), text(decoding(model), 1.0)
    assert len(set(drawn)) > 6
    for _, told, first, second, undisturbed in found:
        assert np.abs(told - expected).max() < 1e-12
        assert (first, second) == (likeliest, drawn)
        assert undisturbed
