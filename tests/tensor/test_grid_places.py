"""What every kind answers alike: where parameters lie, and what of a micro-batch's context is a rank's."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import numpy as np
import pytest
import torch
from grids import grid_of, interpreter
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config import Model
from shoal.mesh import Coords
from shoal.model.context import Context
from shoal.model.decoder import Decoder
from shoal.model.dropout import Noise
from shoal.model.loss import IGNORED
from shoal.model.roles import role_of
from shoal.placement import Box, Placement, Rule, holders
from shoal.tensor.grid import FIRST, SECOND, OnGrid
from shoal.tensor.whole import Whole

# ---- where parameters lie ----------------------------------------------------------------------------------

SIDE = st.integers(1, 3)
LINES = st.one_of(
    st.integers(2, 6).flatmap(lambda p: st.sampled_from([f"tp={p}:1d", f"tp={p}:1d-sp"])),
    st.integers(2, 3).map(lambda q: f"tp={q * q}:2d"),
    SIDE.map(lambda d: f"tp={4 * d}:2.5d/{d}"),
    st.tuples(SIDE, SIDE, SIDE)
    .filter(lambda box: 1 < prod(box) < 19)
    .map(lambda box: "tp={}:{}x{}x{}".format(prod(box), *box)),
)


@st.composite
def models(draw: st.DrawFn, line: str) -> Model:
    """Of sizes that nothing divides but where it must be; GPT-2's modules or Llama's."""
    on = interpreter(line)
    columns, hidden = on.sizes[on.axes.columns], on.sizes.get(on.axes.hidden or "", 1)
    heads = columns * draw(st.integers(1, 2))
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and (n % columns == 0 or columns % n == 0)]
    gpt2, biases = draw(st.booleans()), draw(st.booleans())
    return Model(
        layers=1,
        heads=heads,
        kv_heads=draw(st.sampled_from(fit)),
        head_dim=2 * draw(st.integers(1, 2)),
        hidden=hidden * draw(st.integers(1, 5)),
        ffn=draw(st.integers(1, 11)),
        vocab=draw(st.integers(2, 13)),
        tied=draw(st.booleans()),
        norm="layer" if gpt2 else "rms",
        positions="learned" if gpt2 else "rope",
        max_positions=5,
        gated=not gpt2,
        qk_norm=draw(st.booleans()),
        qkv_bias=biases,
        out_bias=biases,
        ffn_bias=biases,
    )


def rules(on: OnGrid, shape: Model) -> list[tuple[str, Rule, Rule, tuple[int, ...]]]:
    """Of each parameter its role, where it lies, where it would lie on one process, and its shape."""
    with torch.device("meta"):
        module = Decoder(shape)
    found = []
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        role = role_of(module.roles, owner)
        asked = role, owner, local, tuple(parameter.shape)
        found.append((role.kind, on.place(*asked), Whole().place(*asked), tuple(parameter.shape)))
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def assert_filled(placement: Placement) -> None:
    """Every element of the local tensor is of exactly one piece."""
    count = np.zeros(placement.shape, dtype=int)
    for piece in placement.pieces:
        assert [b - a for a, b in piece.box] == [b - a for a, b in piece.at]
        count[slices(piece.at)] += 1
    assert (count == 1).all()


def at(rule: Rule, coords: Coords) -> Placement:
    found = rule.at(coords)
    assert found is not None
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data(), line=LINES)
def test_blocks_tile_every_parameter_and_copies_of_one_know_of_each_other(data: st.DataObject, line: str) -> None:
    """Once, but for the copies that a kind has of all blocks, and key/value heads that several columns share."""
    on, grid = interpreter(line), grid_of(line)
    shape = data.draw(models(line))
    for kind, rule, alone, full in rules(on, shape):
        boxes: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in range(grid.size):
            placement = at(rule, grid.coords(rank))
            assert_filled(placement)
            if not prod(placement.shape):
                event("a rank has nothing of a parameter")
            for piece in placement.pieces:
                boxes[piece.name][piece.box].append(rank)
        wholes = {piece.name: piece.shape for piece in at(alone, {}).pieces}
        assert boxes.keys() == wholes.keys()
        for name, tiles in boxes.items():
            count = np.zeros(wholes[name], dtype=int)
            for box in tiles:
                count[slices(box)] += 1
            assert (count == 1).all(), name
            if len(full) == 2 and kind in FIRST + SECOND:
                shared = name.endswith((".k.weight", ".v.weight"))
                replicas = max(1, on.sizes[on.axes.columns] // shape.kv_heads) if shared else 1
                copies = {len(ranks) for box, ranks in tiles.items() if prod(b - a for a, b in box)}
                assert copies == {replicas * on.sizes.get("depth", 1)}, name
        for rank in range(grid.size):
            found = holders(rule, grid, grid.coords(rank))
            for piece, who in zip(at(rule, grid.coords(rank)).pieces, found, strict=True):
                assert who.copies == tuple(boxes[piece.name][piece.box]), piece.name
                assert rank in who.summing
                assert set(who.summing) <= set(who.copies)


@pytest.mark.parametrize(
    "line", ["tp=4:1d", "tp=4:2d", "tp=9:2d", "tp=8:2.5d/2", "tp=8:3d", "tp=12:2x3x2", "tp=12:3x1x4"]
)
def test_no_rank_has_more_than_its_share_of_a_matrix(line: str) -> None:
    """Feed-forward columns, vocabulary and in-features divide as evenly as whole numbers do."""
    on, grid = interpreter(line), grid_of(line)
    columns = on.sizes[on.axes.columns]
    shape = Model(layers=1, heads=2 * columns, kv_heads=columns, head_dim=2, hidden=24, ffn=31, vocab=37)
    for kind, rule, _, full in rules(on, shape):
        if kind not in FIRST + SECOND:
            continue
        shapes = [at(rule, grid.coords(rank)).shape for rank in range(grid.size)]
        for dim in range(2):
            lengths = {one[dim] for one in shapes}
            fused = 2 if kind == "gate_up" and dim == 0 else 1
            assert max(lengths) - min(lengths) <= fused, f"{kind} {full}"


# ---- what of the context is a rank's -----------------------------------------------------------------------


def numbers(coords: Coords, sizes: dict[str, int], axes: tuple[str, ...], samples: int) -> list[int | None]:
    """Which samples are at ``coords``, None for one that pads: of blocks of one size, in the order of the axes."""
    parts = prod(sizes[axis] for axis in axes)
    number = 0
    for axis in axes:
        number = number * sizes[axis] + coords[axis]
    size = -(-samples // parts)
    return [one if one < samples else None for one in range(number * size, (number + 1) * size)]


def pick(x: Tensor, rows: list[int | None], padding: float | None = None) -> Tensor:
    """What pads is the last sample again, unless told."""
    last = x[-1] if padding is None else torch.full_like(x[0], padding)
    return torch.stack([last if row is None else x[row] for row in rows])


CONTEXTS = pytest.mark.parametrize("samples", [2, 3, 8])


@CONTEXTS
@pytest.mark.parametrize("length", [1, 5, 8])
@pytest.mark.parametrize(
    "line", ["tp=4:1d", "tp=4:1d-sp", "tp=4:2d", "tp=8:2.5d/2", "tp=8:3d", "tp=12:2x3x2", "tp=6:1x2x3"]
)
def test_a_rank_has_of_the_context_what_is_of_its_samples_and_positions(line: str, length: int, samples: int) -> None:
    on, grid = interpreter(line), grid_of(line)
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(samples, length, 1, 2, generator=generator)
    mask = torch.rand(samples, 1, length, length, generator=generator) < 0.5
    labels = torch.randint(0, 9, (samples, length), generator=generator)
    positions = torch.randint(1, 9, (samples, length), generator=generator)
    noise = Noise.of(1, 2, torch.arange(samples), length)
    ctx = Context((angles, -angles), positions, mask, labels, noise, length=length)
    seen: dict[tuple[int, ...], list[int | None]] = {}
    for rank in range(grid.size):
        coords = grid.coords(rank)
        found = on.localise(ctx, coords)
        attended = numbers(coords, on.sizes, on.axes.attended, samples)
        seen[tuple(coords[axis] for axis in on.loss_axes)] = attended
        # The stream has the samples of all ranks that attend to some of them.
        others = list(grid.vary(coords, set(on.axes.attended) - set(on.axes.samples)))
        stream = [one for other in others for one in numbers(other, on.sizes, on.axes.attended, samples)]
        assert found.rope is not None
        assert torch.equal(found.rope[0], pick(angles, attended))
        assert torch.equal(found.rope[1], pick(-angles, attended))
        assert torch.equal(found.mask, pick(mask, attended))
        assert torch.equal(found.labels, pick(labels, stream, IGNORED))
        ranks = on.sizes[on.axes.positions] if on.axes.positions else 1
        place = coords[on.axes.positions] if on.axes.positions else 0
        size = -(-length // ranks)
        span = slice(place * size, (place + 1) * size)

        def cut(x: Tensor, stream: list[int | None] = stream, span: slice = span, size: int = size) -> Tensor:
            part = pick(x, stream)[:, span]
            return torch.nn.functional.pad(part, (0, size - part.shape[1]))

        assert torch.equal(found.positions, cut(positions))
        assert found.noise is not None
        assert torch.equal(found.noise.rows, cut(noise.rows))
        assert found.noise.block == (coords[on.axes.hidden] if on.axes.hidden else 0)
        assert found.length == length
    together = sorted(one for part in seen.values() for one in part if one is not None)
    assert together == list(range(samples)), "each sample's loss is on the ranks of one place on the loss axes"


@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:3d"])
def test_what_serves_all_samples_is_on_every_rank(line: str) -> None:
    """As the angles and the window of samples that all start at position 0."""
    on, grid = interpreter(line), grid_of(line)
    angles, mask = torch.rand(1, 4, 1, 2), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for rank in range(grid.size):
        found = on.localise(Context((angles, angles), mask=mask, length=4), grid.coords(rank))
        assert found.rope is not None
        assert found.rope[0] is angles
        assert found.mask is mask
        assert found.labels is found.noise is found.positions is None
