from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import Array, Contribution, Kept, assert_same, axes_of, divide, gradients, put_together, whole
from torch import Tensor, nn

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import World
from shoal.model.context import Context
from shoal.model.linear import attach_sink
from shoal.model.roles import Role, RoleTable
from shoal.tensor.one_d import OneD
from shoal.train.pool import Pool

HIDDEN, HEADS, HEAD_DIM, FFN, UP = 10, 12, 3, 50, 7
QUERIES = HEADS * HEAD_DIM


class Fused(nn.Linear):
    """Several linears as one, with a bias."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        super().__init__(HIDDEN, sum(parts))
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(self.parts, dim=-1)


class EveryRole(nn.Module):
    """Every role between embedding and head, with biases: grouped heads under a norm of their own, a gated and a plain
    feed-forward, and a linear that no table names. Each position depends on those before it."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = Fused((QUERIES, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM))
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(QUERIES, HIDDEN)
        self.gate_up = Fused((FFN, FFN))
        self.down = nn.Linear(FFN, HIDDEN)
        self.up = nn.Linear(HIDDEN, UP)
        self.down_again = nn.Linear(UP, HIDDEN)
        self.plain = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(self.norm(x)))
        k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
        x = x + self.out((self.q_norm(q) * k + v.tanh().cumsum(1)).flatten(2))
        gate, up = self.gate_up(x)
        x = x + self.down(F.silu(gate) * up)
        x = x + self.down_again(self.up(x).tanh())
        return x + self.plain(x)  # type: ignore[no-any-return]


class Alone(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.block = EveryRole(kv_heads)


def roles(kv_heads: int) -> RoleTable:
    parts = (("q", QUERIES), ("k", kv_heads * HEAD_DIM), ("v", kv_heads * HEAD_DIM))
    return {
        "block.norm": Role("norm"),
        "block.qkv": Role("qkv", parts=parts, heads=HEADS, kv_heads=kv_heads),
        "block.q_norm": Role("head_norm"),
        "block.out": Role("out_proj", heads=HEADS, kv_heads=kv_heads),
        "block.gate_up": Role("gate_up", parts=(("gate", FFN), ("up_proj", FFN))),
        "block.down": Role("down"),
        "block.up": Role("gate_up"),
        "block.down_again": Role("down"),
    }


@dataclass(frozen=True)
class Case:
    ranks: int
    kv_heads: int
    sequence: bool
    samples: int
    length: int

    def numbers(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.samples, self.length, HIDDEN, generator=generator, dtype=torch.float64)


def own(x: Tensor, world: World, sequence: bool, padding: float) -> Tensor:
    """This rank's positions, with ``padding`` after the last."""
    if not sequence:
        return x.clone()
    size = part_size(x.shape[1], world.size)
    return pad(x, 1, size * world.size, padding)[:, world.rank * size :][:, :size].clone()


def positions(length: int) -> Context:
    return Context(rope=(torch.empty(1, length, 1, 0),) * 2, length=length)


def run(world: World, case: Case, sinks: bool) -> tuple[Array, Array, list[Contribution]]:
    """Output, gradient of the input and of the parameters. The input is padded with what must not matter."""
    interpreter = OneD(world.size, sequence=case.sequence)
    made = divide(lambda: Alone(case.kv_heads), roles(case.kv_heads), interpreter, world, axes_of(interpreter))
    made.localise(positions(case.length))
    kept = {}
    for one in made.held:
        if sinks and "norm" not in one.name and "plain" not in one.name and one.name.endswith("weight"):
            kept[one.parameter] = Kept()
            attach_sink(one.parameter, kept[one.parameter])
    x = own(case.numbers(1), world, case.sequence, 7.0).requires_grad_()
    y = made.module.block(x)
    (y * own(case.numbers(2), world, case.sequence, 0.0)).sum().backward()
    assert x.grad is not None
    for parameter, sink in kept.items():
        assert parameter.grad is None
        assert isinstance(sink.gradient, Tensor)
        parameter.grad = sink.gradient
    return y.detach().numpy(), x.grad.numpy(), made.contributions()


def joined(parts: list[Array], case: Case) -> Array:
    """The stream from the ranks' parts of it, which are all of it where it is not divided."""
    if case.sequence:
        return torch.cat([torch.from_numpy(part) for part in parts], 1)[:, : case.length].numpy()  # type: ignore[no-any-return]
    for other in parts[1:]:
        assert (other == parts[0]).all(), "repeated work is the same to the last bit"
    return parts[0]


CASES = [
    Case(2, 6, False, 2, 5),
    Case(2, 6, True, 2, 5),
    Case(3, 3, False, 1, 1),
    Case(3, 3, True, 3, 7),
    Case(4, 2, False, 2, 3),
    Case(4, 2, True, 2, 9),
    Case(4, 1, True, 1, 8),
    Case(4, 12, True, 2, 1),
]


@pytest.mark.parametrize("sinks", [False, True], ids=["autograd", "sinks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_role_computes_what_one_process_does(pool: Pool, case: Case, sinks: bool) -> None:
    model = whole(lambda: Alone(case.kv_heads), roles(case.kv_heads))
    x = case.numbers(1).requires_grad_()
    y = model.block(x)
    (y * case.numbers(2)).sum().backward()
    assert x.grad is not None
    outputs, inputs, contributions = zip(*pool.run(run, case, sinks, ranks=case.ranks), strict=True)
    assert_same(joined(outputs, case), y.detach(), "output")
    assert_same(joined(inputs, case), x.grad, "gradient of the input")
    together, wanted = put_together(contributions), gradients(model, roles(case.kv_heads))
    assert together.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_same(together[name], gradient, name)
