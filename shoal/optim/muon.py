"""Muon (Jordan et al. 2024): hidden matrices move by their momentum made orthogonal.

With gradient G: M ← μM + (1 − μ)G, then U = (1 − μ)G + μM (Nesterov), O = U orthogonalised, and
W ← (1 − ηλ)W − η·0.2√max(rows, columns)·O. That scale gives an update the root mean square of AdamW's, so that both
take one learning rate and one weight decay (Liu et al. 2025, Moonlight).

Each logical weight is orthogonalised by itself, whole: query, key and value are three matrices where they share one
parameter, and a layout that divides a matrix brings its boxes together first. All else is elementwise and done where
the boxes are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.optim.moves import Held, Move, agree, carry, plan
from shoal.optim.runs import Run
from shoal.placement import Box

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5


def orthogonalise(x: Tensor) -> Tensor:
    """UVᵀ, roughly, of a matrix x = USVᵀ [rows, columns], by five Newton–Schulz steps in its own dtype.

    The singular values of the result are between about 0.7 and 1.2: Jordan's coefficients give up exactness for speed.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    y: Tensor = (x.t() if tall else x) / torch.linalg.matrix_norm(x).clamp(min=EPS)
    for _ in range(STEPS):
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.t() if tall else y


def scale(shape: Sequence[int]) -> float:
    """By how much an orthogonal update of ``shape`` is multiplied."""
    return 0.2 * sqrt(max(shape))


class Muon:
    """Updates runs in place, each a box of a matrix. All ranks of ``world`` make and call this together, whatever
    they hold."""

    def __init__(self, config: Optimizer, runs: Sequence[Run], world: World) -> None:
        self._momentum, self._group = config.muon_momentum, world.everyone
        self._runs: dict[tuple[str, Box], Run] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        boxes: dict[str, list[Box]] = defaultdict(list)
        for run in runs:
            assert run.piece is not None, "Muon needs to know what it updates"
            self._runs[run.piece.name, run.piece.box] = run
            shapes[run.piece.name] = run.piece.shape
            boxes[run.piece.name].append(run.piece.box)
        dtype = runs[0].params.dtype if runs else None
        self._like = torch.empty(0, dtype=dtype, device=world.device)
        mine = {name: Held(shape, tuple(boxes[name])) for name, shape in shapes.items()}
        self._plan = plan(agree(mine, self._group, world.device), world.rank)

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """One step on the gradients times ``factor``."""
        updates = self._directions(factor)
        matrices = {name: self._like.new_empty(shape) for name, shape in self._plan.owned.items()}

        def assemble(move: Move, values: Tensor) -> None:
            box = _of(matrices[move.name], move.box)
            box.copy_(values.view_as(box))

        def apply(move: Move, values: Tensor) -> None:
            run = self._runs[move.name, move.box]
            assert run.piece is not None
            rate = lr * run.treatment.lr
            run.params.mul_(1 - rate * run.treatment.weight_decay)
            run.params.add_(values.to(run.params.device), alpha=-rate * scale(run.piece.shape))

        moves, group, like = self._plan, self._group, self._like
        carry(moves.gather, lambda move: updates[move.name, move.box], assemble, group, like, "muon")
        for name, matrix in matrices.items():
            matrices[name] = orthogonalise(matrix)
        carry(moves.scatter, lambda move: _of(matrices[move.name], move.box), apply, group, like, "muon")

    def _directions(self, factor: float) -> dict[tuple[str, Box], Tensor]:
        """The momenta take the gradients in; returns what is to be made orthogonal, in the gradients' place."""
        runs = list(self._runs.values())
        if not runs:
            return {}
        grads = [run.grads().to(run.params) for run in runs]
        momenta = [run.states["momentum_buffer"] for run in runs]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        torch._foreach_lerp_(momenta, grads, 1 - self._momentum)
        torch._foreach_lerp_(grads, momenta, self._momentum)
        return dict(zip(self._runs, grads, strict=True))

    def set_steps(self, steps: int) -> None:
        """Muon counts no steps."""


def _of(matrix: Tensor, box: Box) -> Tensor:
    return matrix[tuple(slice(start, stop) for start, stop in box)]
