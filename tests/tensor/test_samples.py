from __future__ import annotations

from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from decoder_ranks import tied
from grids import SHAPE, interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
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

from shoal.comm.world import World
from shoal.model.decoder import Decoder, decoder_roles
from shoal.tensor.samples import Samples
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

AXES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: list(zip("uvw", sizes, strict=False)))
PADDING = -7.0


def every(axes: list[tuple[str, int]]) -> list[dict[str, int]]:
    """All coordinates, the last axis fastest."""
    names = [name for name, _ in axes]
    return [dict(zip(names, at, strict=True)) for at in product(*(range(size) for _, size in axes))]


# ---- parts -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(axes=AXES, samples=st.integers(1, 20), multiple=st.integers(1, 4))
def test_parts_in_order_are_all_samples_and_the_least_padding(
    axes: list[tuple[str, int]], samples: int, multiple: int
) -> None:
    x = torch.arange(samples * 6.0).view(samples, 2, 3)
    parts = [Samples.over(axes, coords, multiple).of(x) for coords in every(axes)]
    told = [Samples.over(axes, coords, multiple).of(x, PADDING) for coords in every(axes)]
    together = torch.cat(parts)
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % multiple == 0
    assert torch.equal(together[:samples], x)
    assert (together[samples:] == x[-1]).all(), "the last sample again"
    assert torch.equal(torch.cat(told)[:samples], x)
    assert (torch.cat(told)[samples:] == PADDING).all(), "or what is told"
    assert len(together) - samples < prod(size for _, size in axes) * multiple


@settings(max_examples=50, deadline=None)
@given(outer=st.integers(1, 4), inner=st.integers(1, 4), samples=st.integers(1, 20))
def test_parts_divided_further_are_parts_of_the_same_samples(outer: int, inner: int, samples: int) -> None:
    x = torch.arange(1.0, samples + 1)
    for at in range(outer):
        coarse = Samples.over([("u", outer)], {"u": at}, inner).of(x)
        fine = [Samples.over([("u", outer), ("v", inner)], {"u": at, "v": v}).of(x) for v in range(inner)]
        assert torch.equal(torch.cat(fine), coarse)


def test_what_serves_every_sample_and_what_is_not_divided_stays() -> None:
    shared, own = torch.randn(1, 3), torch.randn(5, 3)
    assert Samples(4, 2).of_each(shared) is shared
    assert torch.equal(Samples(4, 2).of_each(own), torch.cat([own[4:], own[4:]]))
    assert Samples().of(own) is own


# ---- samples that pad --------------------------------------------------------------------------------------

MASKED = SHAPE.model_copy(update={"window": 3, "layers": 2, "z_loss": 0.01, "dropout": 0.1})
LENGTH = 7


def inputs(samples: int) -> dict[str, Tensor]:
    """Of two documents each."""
    documents = (torch.arange(LENGTH) > LENGTH // 2).long().expand(samples, LENGTH)
    return {**batch(MASKED.vocab, samples, LENGTH), "documents": documents}


def watched(made: Divided, given: dict[str, Tensor]) -> tuple[float, list[str]]:
    """The loss, whose gradients are made, and the modules whose output or gradient is no number somewhere."""
    bad = []

    def look(name: str, found: object) -> None:
        tensors = found if isinstance(found, tuple) else (found,)
        if not all(one.isfinite().all() for one in tensors if isinstance(one, Tensor)):
            bad.append(name)

    for name, module in made.module.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: look(name, out))
    ctx = made.localise(made.module.context(given, train=True))
    loss = made.module(given, ctx)
    loss.backward()
    for name, parameter in made.module.named_parameters():
        look(f"gradient of {name}", parameter.grad)
    return loss.item(), bad


def on_a_rank(world: World, line: str, samples: int) -> tuple[float, list[str], list[Contribution]]:
    on = interpreter(line)
    made = divide(partial(Decoder, tied(MASKED)), decoder_roles(MASKED), on, world, axes_of(on))
    return *watched(made, inputs(samples)), made.contributions()


def alone(samples: int) -> tuple[float, dict[str, Array]]:
    made = divide(partial(Decoder, tied(MASKED)), decoder_roles(MASKED), Whole(), World(), ())
    loss, bad = watched(made, inputs(samples))
    assert not bad
    return loss, gradients(made.module, made.module.roles)


PADDED = pytest.mark.parametrize(
    ("line", "samples"),
    [
        ("tp=4:4x1x1", 1),
        ("tp=4:2x2x1", 1),
        ("tp=4:1x4x1", 3),
        ("tp=4:2d", 1),
        ("tp=4:2d{form=loop}", 1),
        ("tp=8:2.5d/2", 1),
        ("tp=8:3d", 5),
    ],
)


@PADDED
def test_ranks_without_a_sample_make_no_nan_and_change_nothing(eight: Pool, line: str, samples: int) -> None:
    """Under masks of documents and of a window, with dropout, z-loss and tied embeddings."""
    on = interpreter(line)
    losses, bad, contributions = zip(*eight.run(on_a_rank, line, samples, ranks=prod(on.sizes.values())), strict=True)
    assert not any(bad), bad
    loss, wanted = alone(samples)
    assert_same(total_loss(losses, on), loss, "loss")
    together = put_together(contributions)
    assert together.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same(together[name], gradient, name)


def beside_a_row_too_large(world: World, line: str, samples: int) -> list[str]:
    """Token 0 does not occur, and its row of the table is more than there are numbers for."""
    on = interpreter(line)
    made = divide(partial(Decoder, MASKED), decoder_roles(MASKED), on, world, axes_of(on))
    (table,) = (one for one in made.held if one.name == "embed.table.weight")
    if table.placement.pieces[0].box[0][0] == 0:
        table.parameter.data[0] = torch.inf
    given = inputs(samples)
    return watched(made, given | {"tokens": given["tokens"].clamp(min=1)})[1]


@PADDED
def test_a_token_that_never_occurs_is_in_no_padding(eight: Pool, line: str, samples: int) -> None:
    """In padding, whose gradients are zero, its row would make NaN of those of all weights."""
    ranks = prod(interpreter(line).sizes.values())
    assert eight.run(beside_a_row_too_large, line, samples, ranks=ranks) == [[]] * ranks
