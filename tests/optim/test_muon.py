from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.optim.moves import Held, plan
from shoal.optim.muon import Muon, orthogonalise, scale
from shoal.optim.runs import Run
from shoal.optim.treatment import Treatment
from shoal.placement import Box, Piece
from shoal.train.pool import Pool
from shoal.train.textbook import newton_schulz

CONFIG = Optimizer(name="muon", muon_momentum=0.9)
SHAPES = {"square": (6, 6), "tall": (9, 4), "wide": (3, 10), "row": (1, 5)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = u @ torch.diag(torch.linspace(0.2, 1.0, min(shape), dtype=torch.float64)) @ vh
    found = u.T @ orthogonalise(1e-3 * x) @ vh.T
    values = found.diagonal()
    assert torch.allclose(found, torch.diag(values), atol=1e-12)
    assert 0.65 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_short_side_is_multiplied_and_nothing_else_changes(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(x), newton_schulz(x), rtol=1e-10, atol=1e-10)
    assert not orthogonalise(torch.zeros(shape)).any(), "and nothing is divided by zero"


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_it_is_pytorchs_muon_but_for_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's works in bfloat16 on its way; here it is made to stay in float64."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    given = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    theirs = torch.optim.Muon(given.values(), lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    params, grads = tensors(0), tensors(0)
    runs = [run(name, ((0, r), (0, c)), params[name], grads[name]) for name, (r, c) in SHAPES.items()]
    muon = Muon(CONFIG, runs, World())
    for step in range(1, 4):
        for name, value in tensors(step).items():
            grads[name].copy_(value)
            given[name].grad = value * 0.5
        theirs.step()
        muon.update(0.02, 0.5)
        for name in SHAPES:
            torch.testing.assert_close(params[name], given[name].detach(), rtol=1e-10, atol=1e-10)


def run(name: str, box: Box, params: Tensor, grads: Tensor) -> Run:
    """A box of a matrix as a run. ``params`` and ``grads`` are of the box, contiguous."""
    flat = params.view(-1)
    treatment = Treatment("muon", 1.0, 0.3, ("momentum_buffer",))
    piece = Piece(name, SHAPES[name], box, box)
    return Run(flat, partial(grads.view, -1), {"momentum_buffer": torch.zeros_like(flat)}, treatment, piece)


def boxes_of(rank: int, kind: str) -> dict[str, list[Box]]:
    """What each of four ranks has of the matrices: rows or columns of them, flat ranges, or copies."""
    held: dict[str, list[Box]] = {}
    for name, (rows, columns) in SHAPES.items():
        half = columns // 2
        everything = ((0, rows), (0, columns))
        held[name] = {
            "copies": [everything],
            "columns": [((0, rows), (columns * rank // 4, columns * (rank + 1) // 4))],
            "ranges": [[((0, 1), (0, half))], [((0, 1), (half, columns)), ((1, rows), (0, columns))], [], []][rank],
            "grid with copies": [((0, rows), ((0, half), (half, columns))[rank % 2])],
            "uneven": [everything] if rank == len(name) % 4 else [],
        }[kind]
    return {name: [box for box in boxes if all(a < b for a, b in box)] for name, boxes in held.items()}


def cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*span) for span in box)].clone()


def train(world: World, kind: str) -> tuple[list[tuple[str, Box, object]], float]:
    """Two steps; what this rank then has, and the words it has received."""
    values, gradients = tensors(0), [tensors(step) for step in (1, 2)]
    held = [(name, box) for name, boxes in boxes_of(world.rank, kind).items() for box in boxes]
    params = [cut(values[name], box) for name, box in held]
    grads = [torch.empty_like(one) for one in params]
    muon = Muon(CONFIG, [run(*at, p, g) for at, p, g in zip(held, params, grads, strict=True)], world)
    for step in gradients:
        for (name, box), grad in zip(held, grads, strict=True):
            grad.copy_(cut(step[name], box))
        world.ledger.clear()
        muon.update(0.1, 0.5)
    found = [(name, box, one.numpy()) for (name, box), one in zip(held, params, strict=True)]
    assert world.ledger.words() == world.ledger.words(purpose="muon")
    return found, world.ledger.words()


def truth() -> dict[str, Tensor]:
    values = {name: nn.Parameter(value) for name, value in tensors(0).items()}
    momenta = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in (1, 2):
        for name, grad in tensors(step).items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * 0.5 * grad
            update = newton_schulz(0.9 * momenta[name] + 0.1 * 0.5 * grad)
            values[name].data = (1 - 0.1 * 0.3) * values[name].data - 0.1 * scale(SHAPES[name]) * update
    return {name: value.detach() for name, value in values.items()}


WORDS = {
    "copies": 3 * (36 + 36 + 30 + 5),  # the other three are sent all of it
    "columns": 2 * (36 - 6) + 2 * (36 - 9) + 2 * (30 - 6) + 2 * (5 - 2),  # ranks 0, 1, 2, 3 own one each
    "ranges": 2 * 3 + 2 * 2 + 2 * 5 + 2 * 3,  # rank 0's half rows go to rank 1 and back; the row, to rank 0
    "grid with copies": (18 + 54) + (18 + 54) + (15 + 45) + (2 + 7),  # one half comes, three halves go
    "uneven": 0,  # each is whole on one rank
}
"""In the two exchanges of a step, over all ranks: what is not at the owner goes there once, and comes back to all who
hold it."""


@pytest.mark.parametrize("kind", WORDS)
def test_a_matrix_is_updated_alike_however_it_lies(kind: str, pool: Pool) -> None:
    expected = truth()
    every = pool.run(train, kind)
    covered = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, box, values in (one for found, _ in every for one in found):
        part = tuple(slice(*span) for span in box)
        torch.testing.assert_close(torch.as_tensor(values), expected[name][part], rtol=1e-11, atol=1e-11)
        covered[name][part] = 1
    assert all(seen.all() for seen in covered.values())
    assert sum(received for _, received in every) == WORDS[kind]


def test_the_work_is_shared_among_those_who_hold_much() -> None:
    """Two replicas of nine matrices, of which the large one is worth as much as the others."""
    shapes = {"large": (16, 16), **{f"m{i}": (8, 8) for i in range(8)}}
    everything = {name: Held(shape, (((0, shape[0]), (0, shape[1])),)) for name, shape in shapes.items()}
    owned = [plan([everything] * 2, rank).owned for rank in range(2)]
    assert owned == [{"large": (16, 16)}, {f"m{i}": (8, 8) for i in range(8)}]
    few = Held((16, 16), (((0, 1), (0, 16)),))
    rest = Held((16, 16), (((1, 16), (0, 16)),))
    assert plan([{"w": few}, {"w": rest}], 0).owned == {}, "not by one who has little of it"
    with pytest.raises(AssertionError, match="w: its boxes are not all of it"):
        plan([{"w": rest}, {"w": rest}], 0)
