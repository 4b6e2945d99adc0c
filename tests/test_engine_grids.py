"""The engine with tensor parallelism on a grid: a kind of each, and what a step may be given there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from engine_ranks import Array, Held, put_together, weights
from families import FAMILIES, config
from precision_ranks import make, read, train

from shoal.comm.world import World
from shoal.config import Config
from shoal.data.batches import Synthetic, mask_labels
from shoal.engine import Engine, StepResult
from shoal.layout import Layout
from shoal.model.generate import Decode, generate
from shoal.train.pool import Pool
from shoal.train.setup import learning_rate, make_engine, make_model
from shoal.train.verify import verify

KINDS = {
    "llama3": "dp=2,tp=4:2d,zero=2",
    "qwen3": "tp=8:3d",
    "gpt2": "tp=8:2.5d/2{form=loop}",
    "gemma": "tp=4:1x2x2",
    "mistral": "tp=4:2d,pp=2:1f1b,mb=4",
    "llama2": "dp=2,tp=4:2x1x2,zero=3,recompute=full",
    "qwen2": "tp=4:2d,recompute=selective",
}
"""A kind for each family: every kind of grid, and its products with what else there is."""


@pytest.mark.parametrize(("family", "line"), KINDS.items())
def test_a_kind_agrees_with_one_process(family: str, line: str, eight: Pool) -> None:
    changes = {"tied": family in ("gemma", "gpt2", "mistral"), "z_loss": 0.01 if family == "qwen3" else 0.0}
    report = verify(config(family, **changes), Layout.parse(f"{line},dtype=float64"), eight, steps=2)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-12
    assert report.drift == 0.0
    assert len(report.worst) > 50, "every gradient and every weight is compared"


@pytest.mark.parametrize(
    ("name", "line"), [("muon", "tp=8:3d"), ("lion", "tp=4:2d{form=loop}"), ("sgd", "tp=8:2.5d,zero=3")]
)
def test_an_optimizer_agrees_with_one_process(name: str, line: str, eight: Pool) -> None:
    run = config("llama3", layers=2)
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"name": name})})
    report = verify(run, Layout.parse(f"{line},dtype=float64"), eight, steps=3)
    assert report.agree, report.faults


# ---- what steps are given


@dataclass(frozen=True)
class Given:
    """A step's samples over all replicas, and how many tokens each has."""

    samples: int
    tokens: int


GIVEN = (Given(8, 13), Given(2, 5), Given(2, 1), Given(6, 17))
"""Numbers that grids do not divide; with two replicas or two micro-batches, of a single sample."""
FROZEN = ("embed.*", "blocks.0.*", "blocks.1.attn_norm.*", "blocks.1.ffn.gate_up.*", "head.norm.*")


@dataclass(frozen=True)
class Course:
    """What came of some steps, and of the evaluation of other samples after each."""

    steps: list[StepResult]
    evaluated: list[tuple[float, float]]
    weights: list[Held]


def course(world: World, run: Config, line: str, frozen: Sequence[str], given: Sequence[Given]) -> Course:
    """Train an engine of ``run`` with the weights that patterns in ``frozen`` name left as they are."""
    layout = Layout.parse(f"{line},dtype=float64")
    model = make_model(run, layout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in frozen))
    engine = Engine(model, layout, optimizer=run.optimizer, rate=learning_rate(run), seed=run.run.seed, world=world)
    steps, evaluated = [], []
    for number, one in enumerate(given):
        source = Synthetic(vocab=run.model.vocab, seq_len=one.tokens, batch=one.samples, seed=number)
        batch = mask_labels(source.batch(0, engine.mesh.coords["dp"], layout.dp), seed=number, high=0.6)
        steps.append(engine.step(batch))
        evaluated.append(engine.evaluate(source.batch(1, engine.mesh.coords["dp"], layout.dp)))
    return Course(steps, evaluated, weights(engine))


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "line", "frozen"),
    [
        ("llama3", "tp=8:2x2x2,mb=2", FROZEN),
        ("gpt2", "tp=8:2.5d,zero=1", ()),
        ("mistral", "dp=2,tp=4:2d{form=loop},zero=3", FROZEN),
        *(
            pytest.param(*case, marks=pytest.mark.parity)
            for case in (
                ("llama3", "tp=8:2x2x2,mb=2", ()),
                ("qwen3", "tp=8:2.5d,zero=3,recompute=selective", FROZEN),
                ("gemma", "dp=2,tp=4:2d{form=loop},zero=3", ()),
                ("gpt2", "dp=2,tp=4:1x2x2,recompute=full", ()),
                ("gpt2", "dp=2,tp=4:1x2x2,recompute=full", FROZEN),
                ("llama2", "tp=4:2x1x2,pp=2:1f1b,mb=2", FROZEN),
            )
        ),
    ],
)
def test_steps_of_other_shapes_and_frozen_weights(family: str, line: str, frozen: Sequence[str], eight: Pool) -> None:
    run = config(family, layers=2, tied=not frozen)
    (alone,) = eight.run(course, run, "dp=1", frozen, GIVEN, ranks=1)
    told = eight.run(course, run, line, frozen, GIVEN, ranks=8)
    for found in told:
        for mine, expected in zip(found.steps, alone.steps, strict=True):
            assert (mine.loss, mine.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-11)
            assert mine.weight == expected.weight
        for evaluated, truth in zip(found.evaluated, alone.evaluated, strict=True):
            assert evaluated == pytest.approx(truth, rel=1e-11)
    full, true = put_together(found.weights for found in told), put_together([alone.weights])
    assert full.keys() == true.keys()
    for name, tensor in true.items():
        torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-10)


# ---- decoding


PROMPT = [7, 20, 33, 8, 9, 60, 2]


def logits(decode: Decode) -> Array:
    """[tokens, vocabulary] after a prompt longer than any window, and after each of some tokens that follow it."""
    return np.stack([decode(given).numpy() for given in (PROMPT, [3], [58], [3], [0])])


def said(world: World, run: Config, line: str) -> tuple[Array, list[int]]:
    engine = make_engine(run, Layout.parse(f"{line},dtype=float64"), world)
    return logits(engine.decoding()), list(generate(engine.decoding(), PROMPT, tokens=8, temperature=0))


DECODED = [("llama3", "tp=4:2d"), ("mistral", "tp=8:3d"), ("gpt2", "dp=2,tp=4:2x1x2,zero=3")]
FURTHER = ["tp=8:2.5d{form=loop}", "tp=4:1x1x4", "tp=4:2d,pp=2:1f1b,mb=2"]


@pytest.mark.parametrize(
    ("family", "line"),
    [
        *DECODED,
        *(
            pytest.param(family, line, marks=pytest.mark.parity)
            for family in FAMILIES
            for line in (*(line for _, line in DECODED), *FURTHER)
            if (family, line) not in DECODED
        ),
    ],
)
def test_a_kind_says_what_one_process_says(family: str, line: str, eight: Pool) -> None:
    run = config(family)
    ((expected, text),) = eight.run(said, run, "dp=1", ranks=1)
    for found, mine in eight.run(said, run, line, ranks=Layout.parse(line).ranks):
        assert np.abs(found - expected).max() < 1e-12
        assert mine == text


# ---- half precision


def halves(world: World, line: str, steps: int, scale: float | None) -> tuple[list[StepResult], list[Held]]:
    """Some steps from the loss scale that is usual, or from ``scale``."""
    run = read("optimizer.skips=0")
    engine = make(world, run, line)
    if scale is not None:
        engine._guard.scale = scale
    return train(engine, run, steps), weights(engine)


@pytest.mark.parity
@pytest.mark.parametrize(
    "line",
    [
        "tp=4:2d,dtype=bf16",
        "tp=8:3d,dtype=fp16",
        *(
            pytest.param(line, marks=pytest.mark.parity)
            for line in (
                "tp=4:2d,dtype=fp16",
                "tp=8:3d,dtype=bf16",
                "tp=8:2.5d{form=loop},zero=3,dtype=bf16{grads=bf16}",
            )
        ),
    ],
)
def test_half_precision_stays_near_float32(line: str, eight: Pool) -> None:
    ((expected, _),) = eight.run(halves, "dp=1,dtype=float32", 6, None, ranks=1)
    told = eight.run(halves, line, 6, None, ranks=Layout.parse(line).ranks)
    for found, _ in told:
        assert found == told[0][0]
        assert not any(one.skipped for one in found)
        assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=5e-3)
        assert [one.grad_norm for one in found] == pytest.approx([one.grad_norm for one in expected], rel=0.05)
    put_together(held for _, held in told)  # compares the copies


@pytest.mark.parametrize("line", ["tp=4:2d,dtype=fp16", pytest.param("tp=8:3d,dtype=fp16", marks=pytest.mark.parity)])
def test_a_step_that_overflows_is_skipped_by_the_whole_grid(line: str, eight: Pool) -> None:
    told = eight.run(halves, line, 8, 2.0**24, ranks=Layout.parse(line).ranks)
    skipped = [one.skipped for one in told[0][0]]
    assert (skipped[0], skipped[-1]) == (True, False)
    for found, _ in told:
        assert [one.skipped for one in found] == skipped
    put_together(held for _, held in told)
