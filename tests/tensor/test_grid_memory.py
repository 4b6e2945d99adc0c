"""Bytes that a rank of a grid holds, by the meter: weights, and what is kept for the backward pass.

M tokens; a linear from K features to N. A square has q·q ranks; P ranks in all.
"""

from __future__ import annotations

import time
from functools import partial
from math import prod

import pytest
import torch
from grids import SHAPE, interpreter, mesh_of, middle_block, stream_block
from tensor_ranks import axes_of, batch, divide, settle
from torch import nn

from shoal.comm.world import World
from shoal.local import Interpreter
from shoal.meter import Meter
from shoal.model.context import Context
from shoal.model.decoder import Decoder, decoder_roles
from shoal.model.roles import Role
from shoal.tensor.grid import OnGrid
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

WORD = 8
SAMPLES, LENGTH, NARROW, WIDE = 8, 16, 48, 144
TOKENS = SAMPLES * LENGTH

KINDS = {
    4: ["1d", "1d-sp", "2d", "2d{form=loop}", "1x2x2", "2x1x2"],
    8: ["1d", "1d-sp", "2.5d/2", "2.5d/2{form=loop}", "3d", "1x2x4"],
}
"""By the number of ranks."""
LINES = {ranks: [f"tp={ranks}:{kind}" for kind in kinds] for ranks, kinds in KINDS.items()}

RANKS = pytest.mark.parametrize("ranks", [4, 8])


def weight_ranks(line: str) -> int:
    """Over how many ranks the kind divides a weight: all of them, but those at other depths."""
    return prod(size for axis, size in interpreter(line).sizes.items() if axis != "depth")


# ---- one linear --------------------------------------------------------------------------------------------


def of_linears(world: World, lines: list[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """By line, of a block's first and second linear: the weight, and what is alive after the forward pass besides it
    and the output. In words."""
    found = {}
    for line in lines:
        on, mesh = interpreter(line), mesh_of(line, world)
        on.see(Context(None, length=LENGTH))
        for which, features, block, ports in (
            ("first", (NARROW, WIDE), stream_block, on.first),
            ("second", (WIDE, NARROW), middle_block, on.second),
        ):
            whole = nn.Linear(*features, bias=False, device="meta")
            placement = on.place(Role("gate_up" if which == "first" else "down"), "it", "weight", whole.weight.shape)
            given = block(torch.randn(SAMPLES, LENGTH, features[0]).double(), on, mesh.coords)
            with Meter() as meter:
                shape = placement.at(mesh.coords).shape  # type: ignore[union-attr]
                whole.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
                meter.label("weights", [whole.weight])
                linear = on.linear(whole, ports(features[0], mesh), (), mesh)
                with meter.phase("forward"):
                    y = linear(given.clone().requires_grad_())  # nobody else has this copy
                settle(meter, given.nbytes + y.nbytes)
                kept = meter.live("activations") - y.nbytes
                found[line, which] = meter.live("weights") / WORD, kept / WORD
    return found


@RANKS
def test_a_linear_keeps_its_blocks_and_none_that_it_gathered(ranks: int, eight: Pool) -> None:
    """KN/P of the weight (KN/q² at every depth) and MK/P of the input; before the first linear of one dimension all of
    it, which its ranks share."""
    for found in eight.run(of_linears, LINES[ranks], ranks=ranks):
        for (line, which), (weight, kept) in found.items():
            k = NARROW if which == "first" else WIDE
            shared = line.endswith(":1d") and which == "first"
            assert weight == NARROW * WIDE / weight_ranks(line), line
            assert kept == TOKENS * k / (1 if shared else ranks), f"{line}, {which}"


# ---- a decoder ---------------------------------------------------------------------------------------------


def of_decoders(world: World, lines: list[str]) -> list[tuple[int, int]]:
    """For each line: bytes of the parameters of a block, and what it keeps for the backward pass."""
    return [one_block(world, interpreter(line)) for line in lines]


def alone(world: World) -> tuple[int, int]:
    return one_block(world, Whole())


def one_block(world: World, on: Interpreter) -> tuple[int, int]:
    found = []
    for layers in (1, 2):
        shape = SHAPE.model_copy(update={"layers": layers})
        axes = axes_of(on) if isinstance(on, OnGrid) else ()
        made = divide(partial(Decoder, shape), decoder_roles(shape), on, world, axes)
        inputs = batch(shape.vocab, SAMPLES, LENGTH)
        ctx = made.localise(made.module.context(inputs))
        with Meter() as meter:
            meter.label("parameters", made.module.parameters())
            with meter.phase("forward"):
                loss = made.module(inputs, ctx)
            time.sleep(0.05)  # as in settle
            found.append((meter.live("parameters"), meter.live("activations")))
        del loss
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


@pytest.mark.parity
@RANKS
def test_a_block_takes_its_share_of_what_it_takes_on_one_process(ranks: int, eight: Pool) -> None:
    """But for what is not divided over all ranks: vectors, a number for each row and norm, weights at other depths; of
    one dimension also the stream. A divided norm keeps its input alone; PyTorch's, in parts, also what it makes of it.
    """
    ((weights, kept),) = eight.run(alone, ranks=1)
    of_norms = 2 * TOKENS * SHAPE.hidden * WORD
    for found in eight.run(of_decoders, LINES[ranks], ranks=ranks):
        for line, (own_weights, own_kept) in zip(LINES[ranks], found, strict=True):
            assert own_weights == pytest.approx(weights / weight_ranks(line), rel=0.05), line
            if line.endswith(":1d"):
                assert own_kept > 1.5 * kept / ranks, line
                continue
            hidden = interpreter(line).axes.hidden
            divided_norms = hidden is not None and interpreter(line).sizes[hidden] > 1
            assert own_kept == pytest.approx((kept - of_norms * divided_norms) / ranks, rel=0.05), line
