"""Modules in pieces: what one rank of tensor parallelism has of a module, and what the ranks' pieces make together.

No engine: a module is laid out, materialised and adapted here as an engine would.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.local import Interpreter, LocalParameter, adapt, lay_out, materialise
from shoal.mesh import Grid, Mesh
from shoal.meter import Meter
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED
from shoal.model.roles import RoleTable
from shoal.placement import Box, assemble
from shoal.tensor.grid import OnGrid
from shoal.tensor.whole import Whole

Axes = tuple[tuple[str, int], ...]
Array = np.ndarray[Any, Any]  # what workers send back: a tensor would have to stay alive there


@dataclass(frozen=True)
class Contribution:
    """A rank's gradient of one box of a logical tensor, and the ranks whose gradients of it add up."""

    name: str
    shape: tuple[int, ...]
    box: Box
    summing: tuple[int, ...]
    gradient: Array


@dataclass
class Divided:
    """A module as one rank has it."""

    module: Any
    interpreter: Interpreter
    mesh: Mesh
    held: list[LocalParameter]

    def localise(self, ctx: Any) -> Any:
        """What of ``ctx`` is this rank's. Modules are told of it at once, which is enough while all have one length."""
        self.interpreter.see(ctx)
        return self.interpreter.localise(ctx, self.mesh.coords)

    def contributions(self) -> list[Contribution]:
        found = []
        for one in self.held:
            assert one.parameter.grad is not None, one.name
            for piece, who in zip(one.placement.pieces, one.holders, strict=True):
                gradient = piece.of(one.parameter.grad).numpy().copy()
                found.append(Contribution(piece.name, piece.shape, piece.box, who.summing, gradient))
        return found


@dataclass
class Kept:
    """A sink that keeps a weight's gradient."""

    gradient: Tensor | float = 0.0

    def later(self, contribution: Callable[[], None]) -> bool:
        return False

    def add_arriving(self, arrive: Callable[[], Tensor]) -> None:
        self.gradient = self.gradient + arrive()

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self.gradient = self.gradient + left.t() @ right


def divide(
    make: Callable[[], nn.Module], roles: RoleTable, interpreter: Interpreter, world: World, axes: Axes
) -> Divided:
    """What ``make`` makes, in float64, as this rank of the mesh ``axes`` has it. Its layers are its children, if it is
    no decoder."""
    with torch.device("meta"):
        module = make().to(torch.float64)
    layers = module.layers() if isinstance(module, Decoder) else list(module.named_children())
    mesh = Mesh((("dp", 1), *axes), world)
    held = lay_out(module, layers, roles, interpreter, mesh.grid, mesh.coords)
    held = materialise(module, held, 0, world.device)
    with torch.no_grad():
        for one in held:
            for piece in one.placement.pieces:
                _spread(piece.of(one.parameter), piece.shape[0], piece.box[0])
    for name, layer in layers:
        adapt(name, layer, roles, interpreter, mesh)
    return Divided(module, interpreter, mesh, held)


def axes_of(interpreter: OnGrid) -> Axes:
    """The mesh axes that a grid is divided over."""
    return tuple(interpreter.sizes.items())


def total_loss(losses: Sequence[float], interpreter: OnGrid) -> float:
    """The loss of all samples from those of all ranks, which are the same to the last bit where samples are."""
    grid = Grid(axes_of(interpreter))
    by_samples: dict[tuple[int, ...], set[float]] = defaultdict(set)
    for rank, loss in enumerate(losses):
        coords = grid.coords(rank)
        by_samples[tuple(coords[axis] for axis in interpreter.loss_axes)].add(loss)
    assert all(len(same) == 1 for same in by_samples.values()), by_samples
    return sum(loss for same in by_samples.values() for loss in same)


def _spread(values: Tensor, rows: int, span: tuple[int, int]) -> None:
    """Larger than at the start of training, and no vector constant, so that every part of a module matters."""
    if values.ndim > 1:
        values *= 10
    else:
        values += torch.linspace(-0.5, 0.5, rows, dtype=values.dtype)[slice(*span)]


def whole(make: Callable[[], nn.Module], roles: RoleTable) -> Any:
    """The same module with the same values on one process."""
    return divide(make, roles, Whole(), World(), ()).module


def put_together(ranks: Iterable[list[Contribution]]) -> dict[str, Array]:
    """The full gradients by logical name, NaN where no rank has them; those of duplicated work must agree."""
    by_box: dict[tuple[str, Box], dict[int, Contribution]] = defaultdict(dict)
    for rank, contributions in enumerate(ranks):
        for one in contributions:
            by_box[one.name, one.box][rank] = one
    held: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
    shapes = {}
    for (name, box), found in by_box.items():
        sums = [sum(found[rank].gradient for rank in one.summing) for one in found.values()]
        for other in sums[1:]:
            assert_same(other, sums[0], name)
        held[name].append((box, torch.from_numpy(np.asarray(sums[0]))))
        shapes[name] = next(iter(found.values())).shape
    return {name: assemble(shapes[name], boxes).numpy() for name, boxes in held.items()}


def gradients(module: nn.Module, roles: RoleTable) -> dict[str, Array]:
    """The gradients of a whole module by logical name."""
    layers = [(name, layer) for name, layer in module.named_children()]
    held = lay_out(module, layers, roles, Whole(), Grid((("dp", 1),)), {"dp": 0})
    return {
        piece.name: piece.of(one.parameter.grad).numpy()  # type: ignore[arg-type]
        for one in held
        for piece in one.placement.pieces
    }


def assert_same(found: Any, expected: Any, name: str = "", tolerance: float = 1e-12, floor: float = 0.0) -> None:
    """Equal to ``tolerance`` of the norm of what is expected, or of ``floor`` an element if that is more."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == b.shape, f"{name}: {a.shape} for {b.shape}"
    error, norm = np.linalg.norm(a - b), max(np.linalg.norm(b), floor * b.size**0.5)
    assert error <= tolerance * norm, f"{name}: {error / max(norm, 1e-300):.2e} of {norm:.2e}"


def settle(meter: Meter, nbytes: int) -> None:
    """Wait a little if more is alive: gloo's threads let go of a tensor some moments after they have sent it."""
    for _ in range(100):
        if meter.live("activations") <= nbytes:
            break
        time.sleep(0.01)


def settled(meter: Meter) -> int:
    """The bytes of activations that stay alive: the least of what is read during some moments."""
    least = meter.live("activations")
    for _ in range(30):
        time.sleep(0.01)
        least = min(least, meter.live("activations"))
    return least


def batch(vocab: int, samples: int, length: int) -> dict[str, Tensor]:
    """Random tokens and labels, of which each sample has another share masked, the first all of them but one."""
    generator = torch.Generator().manual_seed(samples * 1000 + length)
    tokens = torch.randint(0, vocab, (samples, length + 1), generator=generator)
    share = torch.linspace(1.0, 0.0, samples)[:, None]
    masked = torch.rand(samples, length, generator=generator) < share
    masked[0, length // 2] = False
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].masked_fill(masked, IGNORED),
        "positions": torch.arange(length).expand(samples, length),
        "sample": torch.arange(samples) * 5 + 3,
    }
