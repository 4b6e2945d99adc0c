"""Small models under every way of keeping replicas equal, run without an engine, and on one process beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.data_parallel import flat as flat_module
from shoal.data_parallel import sync as sync_module
from shoal.data_parallel import visits as visits_module
from shoal.data_parallel import zero as zero_module
from shoal.data_parallel.allreduce import AllReduce
from shoal.data_parallel.flat import is_open
from shoal.data_parallel.server import Server
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.sync import Sync
from shoal.data_parallel.zero import Zero, ZeroThree
from shoal.local import LocalParameter, lay_out
from shoal.mesh import Mesh
from shoal.model.linear import Linear
from shoal.optim.clip import clip_factor
from shoal.optim.optimizers import Updater
from shoal.optim.treatment import Treatments, state_names
from shoal.placement import Box, Fragment, Holders, Rule, assemble, holders, whole
from shoal.tensor.whole import Whole

KINDS = ("allreduce", "zero1", "zero2", "zero3", "server")
OPTIMIZER = Optimizer(name="adamw", lr=0.05, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.3, clip=2.0)
Values = dict[tuple[str, str], Tensor]  # by kind ("weight", "gradient", …) and logical name


def make(
    kind: str,
    held: Sequence[LocalParameter],
    mesh: Mesh,
    *,
    size: int | None = None,
    uses: Mapping[int, Sequence[str]] | None = None,
    resident: bool = False,
    stale: int = 0,
    **options: Any,
) -> Sync:
    """The Sync called ``kind``; unless told, it divides over all ranks, or one of them serves, and each unit uses the
    parameters it owns."""
    treat, servers, size = Treatments(OPTIMIZER), size or 1, size or mesh.world.size
    given = ([one for one in held if one.parameter.requires_grad],
             [one for one in held if not one.parameter.requires_grad], treat, mesh)  # fmt: skip
    if kind == "allreduce":
        return AllReduce(*given, Sharing(**options))
    if kind in ("zero1", "zero2"):
        return Zero(*given, Sharing(size=size, keep_grads=kind == "zero1", **options))
    own = {unit: [one.name for one in held if one.unit == unit] for unit in {one.unit for one in held}}
    if kind == "server":
        return Server(*given, Sharing(servers=servers, **options), uses=uses or own, stale=stale)
    sharing = Sharing(size=size, keep_params=False, keep_grads=False, cap_bytes=0)
    return ZeroThree(*given, sharing, uses=uses or own, resident=resident)


def by_hand(
    mesh: Mesh, shapes: Mapping[str, tuple[int, ...]], rules: Mapping[str, Rule] | None = None
) -> dict[str, LocalParameter]:
    """Parameters by name, such as ``w1``, whose last character is the number of their unit; zeros, held whole."""
    held = {}
    for name, shape in shapes.items():
        rule = (rules or {}).get(name, Rule(lambda _, name=name, shape=shape: whole(name, shape)))
        placement = rule.at(mesh.coords)
        assert placement is not None
        parameter = nn.Parameter(torch.zeros(placement.shape, dtype=torch.float64))
        held[name] = LocalParameter(name, parameter, (int(name[-1]),), placement, holders(rule, mesh.grid, mesh.coords))
    return held


def plain(*ranks: int) -> Holders:
    """Ranks that hold a piece and sum its gradient."""
    return Holders(ranks, ranks)


class Found(NamedTuple):
    """A fragment, as it can be sent to another process."""

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    copies: tuple[int, ...]
    values: Any  # a NumPy array


def found(fragments: Iterator[Fragment]) -> list[Found]:
    """The fragments with copies of their contents."""
    return [
        Found(one.kind, one.piece.name, one.piece.shape, one.piece.box, one.copies, one.tensor.clone().numpy())
        for one in fragments
    ]


def assembled(by_rank: Sequence[Sequence[Found]]) -> Values:
    """The full tensors: every box is held by just the ranks that its fragments name, with the same contents, and an
    element that nobody holds is NaN."""
    boxes: dict[tuple[str, str], dict[Box, list[tuple[int, Found]]]] = {}
    for rank, fragments in enumerate(by_rank):
        for one in fragments:
            boxes.setdefault((one.kind, one.name), {}).setdefault(one.box, []).append((rank, one))
    full = {}
    for key, at in boxes.items():
        for box, held in at.items():
            assert [rank for rank, _ in held] == list(held[0][1].copies), f"{key} {box} is not where it is said to be"
            assert all((one.values == held[0][1].values).all() for _, one in held), f"{key} {box}: copies differ"
        parts = [(box, torch.as_tensor(held[0][1].values)) for box, held in at.items()]
        full[key] = assemble(next(iter(at.values()))[0][1].shape, parts)
    return full


# ---- a model in which parameters are used in every way


class Either(nn.Module):
    """Two linear maps, of which the sign of the first input picks one: ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return (self.low if x[0, 0] < 0 else self.high)(x)  # type: ignore[no-any-return]


class Both(nn.Module):
    """A weight with a sink that is also used otherwise, so that autograd has a gradient of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + F.linear(x, self.linear.weight.square()))


class Odds(nn.Module):
    """A scalar, and parameters without a use or without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle, self.empty = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Cube(nn.Module):
    """A weight of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,kji->bj", x, self.weight)


def odd_model(seed: int = 0) -> nn.Sequential:
    """Seven units, of which the second and the fifth are one module. No size divides."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shared = Both()
        layers = [Either(), shared, Odds(), nn.LayerNorm(7), shared, nn.Sequential(Linear(7, 7), nn.Tanh()), Cube()]
        return nn.Sequential(*layers).double()


def square_model(units: int, width: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Units of width·width elements each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Linear(width, width, bias=False) for _ in range(units))).to(dtype)


def batch(step: int, rank: int, number: int, wide: int = 5, out: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and targets. The sign that picks a map differs between ranks, micro-batches and steps."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    x = torch.randn(4, wide, generator=generator, dtype=torch.float64)
    x[0, 0] = (-1) ** (rank // 2 + number + step)
    return x, torch.randn(4, out, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


# ---- under a Sync


class Replica:
    """One rank's replica of ``model``."""

    def __init__(self, world: World, model: nn.Sequential, kind: str, **options: Any) -> None:
        self.layers = list(model)
        mesh = Mesh((("dp", world.size),), world)
        layers = [(str(unit), layer) for unit, layer in enumerate(model)]
        held = lay_out(model, layers, {}, Whole(), mesh.grid, mesh.coords)
        names = {one.parameter: one.name for one in held}
        uses = {unit: [names[one] for one in layer.parameters()] for unit, layer in enumerate(model)}
        self.sync = make(kind, held, mesh, uses=uses, **options)
        self.updater = Updater(OPTIMIZER, self.sync.runs(), world)
        self.norm = 0.0

    def passes(self, x: Tensor, target: Tensor, final: bool, at: Callable[[int], None] = lambda _: None) -> None:
        """Forward and backward, with the Sync told as it happens; ``at(unit)`` runs when the gradients of a unit are
        complete, before the Sync knows."""
        sync, last = self.sync, len(self.layers) - 1
        waiting = list(range(len(self.layers)))

        def complete(unit: int, _: Tensor | None = None) -> None:
            """A hook on the input of ``unit``: it is done, and the unit before it begins."""
            at(unit)
            waiting.remove(unit)
            sync.unit_done(unit, final)
            if unit:
                sync.enter_unit(unit - 1, backward=True)

        for unit, layer in enumerate(self.layers):
            sync.enter_unit(unit, backward=False)
            if x.requires_grad:
                x.register_hook(partial(complete, unit))
            x = layer(x)
            sync.leave_unit(unit)
        sync.enter_unit(last, backward=True)
        loss_of(x, target).backward()
        complete(0)
        assert not waiting

    def reduce(self) -> list[Found]:
        """The gradients of the step."""
        self.sync.reduce(self.sync.units)
        self.sync.finish()
        self.norm = self.sync.norm.find()
        return found(self.sync.gradients())

    def update(self) -> None:
        self.sync.check()
        self.updater.update(1.0, clip_factor(self.norm, OPTIMIZER.clip))
        self.sync.updated(ahead=isinstance(self.sync, Server))

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Found]:
        """A step; returns what this rank has of gradients, weights and states."""
        self.sync.begin()
        for number, (x, target) in enumerate(batches):
            self.passes(x, target, final=number == len(batches) - 1)
        gradients = self.reduce()
        self.update()
        return [*gradients, *found(self.sync.weights()), *found(self.sync.states())]


@contextmanager
def poisoned(sync: Sync) -> Iterator[None]:
    """Memory that a buffer is given, and what is left in gradients, is NaN: what is not written first shows."""

    def opened(tensor: Tensor) -> None:
        flat_module.open_(tensor)
        tensor.fill_(float("nan"))

    for flat in sync.flats:
        for tensor in (flat.grads, flat.own_grads):
            if is_open(tensor):
                tensor.fill_(float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_module, "open_", opened)
        patch.setattr(zero_module, "open_", opened)
        patch.setattr(visits_module, "open_", opened)
        yield


# ---- on one process


def one_process(model: nn.Sequential, steps: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[tuple[Values, float]]:
    """Gradients, weights and states after each step over all ranks' batches, and the norm, by plain PyTorch."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    results = []
    for batches in steps:
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        for x, target in batches:
            loss_of(model(x), target).backward()
        values = {("gradient", name): p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), float("inf")).item()
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad *= clip_factor(norm, OPTIMIZER.clip)
        optimizer.step()
        values |= {("weight", name): p.detach().clone() for name, p in named.items()}
        for state in state_names(OPTIMIZER, "adamw"):
            values |= {(state, name): optimizer.state[p][state].clone() for name, p in named.items()}
        results.append((values, norm))
    return results
