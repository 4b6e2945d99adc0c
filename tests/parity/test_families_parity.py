"""Every family of models computes under a layout what it computes in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import FAMILIES, config

from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.model.generate import Decode, decoding
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone
from shoal.train.verify import verify

LAYOUTS = ("dp=2,zero=3", "tp=2", "tp=2:1d-sp,pp=2:1f1b,mb=4")
QUICK = {
    "llama2": "dp=2,zero=3",
    "llama3": "tp=2:1d-sp",
    "qwen2": "tp=2",
    "qwen3": "tp=2:1d-sp,pp=2:1f1b,mb=4",
    "olmoe": "tp=4",
    "mistral": "tp=2:1d-sp",
    "gemma": "tp=2",
    "mixtral": "dp=2,zero=3",
    "qwen3moe": "tp=2",
    "latent": "tp=4:2d",
    "deepseek2": "tp=2:1d-sp",
    "deepseek3": "tp=2:1d-sp,pp=2:1f1b,mb=4",
    "gpt2": "tp=2:1d-sp,pp=2:1f1b,mb=4",
}
"""One layout a family for the suite that is quick."""


def check(pool: Pool, family: str, line: str, *, steps: int, tied: bool) -> None:
    layout = Layout.parse(f"{line},dtype=float64")
    report = verify(config(family, tied=tied), layout, pool, steps=steps)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift < 1e-12
    assert len(report.worst) > 50, "every gradient and every weight is compared"


@pytest.mark.parametrize(("family", "line"), QUICK.items())
def test_a_family_agrees(family: str, line: str, pool: Pool) -> None:
    check(pool, family, line, steps=2, tied=family in ("gemma", "gpt2"))


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_over_five_steps(family: str, line: str, tied: bool, pool: Pool) -> None:
    check(pool, family, line, steps=5, tied=tied)


LATENTS = ("dp=2", "pp=2:1f1b,mb=4", "tp=4", "tp=4:2d{form=loop}", "tp=4:2x2x1", "tp=4:2x1x2", "tp=4:1x2x2")


@pytest.mark.parity
@pytest.mark.parametrize("line", [*LATENTS, "tp=2:1d-sp,pp=2:zb-h1,mb=4", "dp=2,tp=2:1d-sp,zero=3,mb=2"])
@pytest.mark.parametrize("family", ["latent", "deepseek2"])
def test_latent_attention_agrees_on_every_grid(family: str, line: str, pool: Pool) -> None:
    check(pool, family, line, steps=5, tied=False)


@pytest.mark.parity
@pytest.mark.parametrize("line", ["tp=8:2.5d/2", "tp=8:3d", "tp=4:2d,pp=2:zb-h1,mb=4"])
@pytest.mark.parametrize("family", ["latent", "deepseek2"])
def test_latent_attention_agrees_on_eight_ranks(family: str, line: str, eight: Pool) -> None:
    check(eight, family, line, steps=3, tied=False)


@pytest.mark.parity
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_where_activations_are_made_again(family: str, recompute: str, pool: Pool) -> None:
    check(pool, family, f"tp=2:1d-sp,pp=2:1f1b,mb=2,recompute={recompute}", steps=2, tied=True)


@pytest.mark.parity
@pytest.mark.parametrize("line", ["tp=4", "tp=4:1d-sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_where_a_key_value_head_is_on_several_ranks(family: str, line: str, pool: Pool) -> None:
    check(pool, family, line, steps=3, tied=False)


def logits(decode: Decode) -> np.ndarray[Any, Any]:
    """[tokens, vocabulary] after a prompt longer than any window, and after each of some tokens that follow it."""
    return np.stack([decode(given).numpy() for given in ([7, 20, 33, 8, 9, 60, 2], [3], [58], [3], [0])])


def decoded(world: World, config: Config, layout: Layout) -> np.ndarray[Any, Any]:
    return logits(make_engine(config, layout, world).decoding())


@pytest.mark.parametrize(("family", "line"), QUICK.items())
def test_a_family_decodes_under_a_layout_as_in_one_process(family: str, line: str, pool: Pool) -> None:
    run, layout = config(family), Layout.parse(f"{line},dtype=float64")
    model = make_model(run, layout)
    materialise_alone(model, run.run.seed)
    expected = logits(decoding(model))
    for found in pool.run(decoded, run, layout, ranks=layout.ranks):
        assert np.abs(found - expected).max() < 1e-12
