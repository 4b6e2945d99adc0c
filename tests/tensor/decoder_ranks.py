"""A decoder in pieces, under any interpreter: what ranks compute together, beside what one process does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensor_ranks import (
    Array,
    Contribution,
    Divided,
    assert_same,
    axes_of,
    batch,
    divide,
    gradients,
    put_together,
    total_loss,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import World
from shoal.config import Model, load
from shoal.model.context import Cache
from shoal.model.decoder import Decoder, decoder_roles
from shoal.tensor.grid import OnGrid
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

RUNS = Path(__file__).parents[2] / "runs"
TINY, TINY6 = (load(RUNS / f"{name}.toml").model for name in ("tiny", "tiny6"))


def tied(shape: Model) -> Model:
    return shape.model_copy(update={"tied": True})


@dataclass(frozen=True)
class Case:
    """A decoder, who divides it, and a batch."""

    shape: Model
    interpreter: OnGrid
    length: int = 32
    samples: int = 3
    recompute: bool = False

    @property
    def ranks(self) -> int:
        return prod(self.interpreter.sizes.values())

    def divided(self, world: World) -> Divided:
        make = partial(Decoder, self.shape)
        return divide(make, decoder_roles(self.shape), self.interpreter, world, axes_of(self.interpreter))

    def alone(self) -> Divided:
        return divide(partial(Decoder, self.shape), decoder_roles(self.shape), Whole(), World(), ())

    def batch(self) -> dict[str, Tensor]:
        return batch(self.shape.vocab, self.samples, self.length)


def name(case: Case) -> str:
    shape, who = case.shape, case.interpreter
    said = [f"{shape.heads}-heads", *(["tied"] if shape.tied else []), type(who).__name__]
    said.append("x".join(str(size) for size in who.sizes.values()))
    said += [flag for flag in ("sequence", "loop") if getattr(who, flag, False)]
    said += ["recomputed"] if case.recompute else []
    return "-".join((*said, f"{case.samples}x{case.length}"))


# ---- training ----------------------------------------------------------------------------------------------


def run(made: Divided, inputs: dict[str, Tensor], ctx: Any, recompute: bool) -> Tensor:
    """Layer by layer, each told what it must know when it runs, as an engine does."""
    x = inputs["tokens"]
    for _, layer in made.module.layers():

        def told(x: Tensor, layer: Any = layer) -> Tensor:
            made.interpreter.see(ctx)
            return layer(x, ctx)  # type: ignore[no-any-return]

        x = checkpoint(told, x, use_reentrant=False) if recompute else told(x)
    return x


def train(world: World, case: Case) -> tuple[float, list[Contribution]]:
    """The loss, and the gradients of a hundredth of it."""
    made, inputs = case.divided(world), case.batch()
    ctx = made.localise(made.module.context(inputs, seed=1, step=2, train=True))
    loss = run(made, inputs, ctx, case.recompute)
    (loss * 0.01).backward()
    return loss.item(), made.contributions()


def expected(case: Case) -> tuple[float, dict[str, Array]]:
    model, inputs = case.alone().module, case.batch()
    loss = model(inputs, model.context(inputs, seed=1, step=2, train=True))
    (loss * 0.01).backward()
    return loss.item(), gradients(model, model.roles)


def assert_trains_alike(pool: Pool, case: Case) -> None:
    """The loss and all gradients. One that is zero in exact arithmetic, as of a key's bias where positions are learned,
    is rounding beside those of the whole model."""
    loss, wanted = expected(case)
    losses, contributions = zip(*pool.run(train, case, ranks=case.ranks), strict=True)
    assert_same(total_loss(losses, case.interpreter), loss, "loss")
    together = put_together(contributions)
    assert together.keys() == wanted.keys()
    rms = np.sqrt(np.mean(np.concatenate([one.ravel() for one in wanted.values()]) ** 2))
    for key, gradient in wanted.items():
        assert_same(together[key], gradient, key, floor=rms if key.endswith("attn.k.bias") else 0.0)


# ---- forward alone -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """The loss of an evaluation and the words that it moved, all logits, and those of a prompt and of single positions
    after it."""

    loss: float
    words: float
    logits: tuple[Array, ...]


def forward(world: World, case: Case) -> Forward:
    return evaluate(case.divided(world), case)


@torch.no_grad()
def evaluate(made: Divided, case: Case) -> Forward:
    model, inputs = made.module, case.batch()
    loss = model(inputs, made.localise(model.context(inputs))).item()
    words = made.mesh.world.ledger.words()
    inputs.pop("labels")
    logits = model(inputs, made.localise(model.context(inputs)))
    cache, steps = Cache(), []
    for tokens in inputs["tokens"][:, :5].split((3, 1, 1), 1):
        following = cache.following(tokens)
        steps.append(model(following, made.localise(model.context(following, cache=cache))))
    return Forward(loss, words, tuple(one[: case.samples].numpy() for one in (logits, *steps)))


def assert_evaluates_alike(pool: Pool, case: Case) -> list[float]:
    """Loss and all logits, which every rank has. Returns the words that each moved for the loss."""
    wanted, found = evaluate(case.alone(), case), pool.run(forward, case, ranks=case.ranks)
    assert_same(total_loss([one.loss for one in found], case.interpreter), wanted.loss)
    for one in found:
        for some, right in zip(one.logits, wanted.logits, strict=True):
            assert_same(some, right)
    return [one.words for one in found]
