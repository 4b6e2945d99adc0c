from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from tensor_ranks import Array, assert_same
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.errors import LayoutError
from shoal.model.norms import RMSNormPlusOne
from shoal.tensor.norms import PURPOSE, divided_norm
from shoal.train.pool import Pool

WIDTH = 5  # of one rank's block
KINDS = {
    "rms": lambda width: nn.RMSNorm(width, eps=1e-5),
    "rms-default-eps": nn.RMSNorm,
    "rms-no-weight": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "rms-plus-one": lambda width: RMSNormPlusOne(width, 1e-6),
    "layer": nn.LayerNorm,
    "layer-no-bias": lambda width: nn.LayerNorm(width, bias=False),
    "layer-no-weight": lambda width: nn.LayerNorm(width, elementwise_affine=False),
}


@dataclass(frozen=True)
class Case:
    """A norm, its input and the gradient of its result. The first row of the input is zero, as padding is."""

    kind: str
    ranks: int = 3
    shape: tuple[int, ...] = (2, 3)
    """Of the rows."""
    width: int = WIDTH
    mean: float = 0.0
    std: float = 1.0
    dtype: torch.dtype = torch.float64
    weights: torch.dtype | None = None
    """As ``dtype``, unless told."""
    frozen: bool = False

    def norm(self) -> nn.Module:
        """The whole of it, in float64 but with the values that ``dtype`` has."""
        module = KINDS[self.kind](self.width * self.ranks).double()
        generator = torch.Generator().manual_seed(2)
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = drawn.to(self.weights or self.dtype).double()
            parameter.requires_grad_(not self.frozen)
        return module

    def rows(self) -> tuple[Tensor, Tensor]:
        """Input and gradient, likewise."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, *self.shape, self.width * self.ranks)
        x, grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x * self.std + self.mean
        if x.ndim > 1:
            x[..., :1, :] = 0.0
        return x.to(self.dtype).double(), grad.to(self.dtype).double()


Found = dict[str, Array]


def results(module: nn.Module, x: Tensor, grad: Tensor) -> Found:
    """Output and gradients, in float64."""
    x.requires_grad_()
    y = module(x)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert all(tensor is not None and not tensor.isnan().any() for tensor in found.values())
    assert y.dtype == found["x"].dtype == x.dtype  # type: ignore[union-attr]
    return {name: tensor.double().numpy() for name, tensor in found.items()}  # type: ignore[union-attr]


def block(tensor: Tensor, world: World) -> Tensor:
    return tensor.chunk(world.size, -1)[world.rank].clone()


def divided(world: World, case: Case) -> nn.Module:
    module = case.norm()
    for parameter in module.parameters():
        parameter.data = block(parameter.data, world).to(case.weights or case.dtype)
    return divided_norm(module, world.everyone)


def on_a_rank(world: World, case: Case) -> Found:
    x, grad = (block(tensor, world).to(case.dtype) for tensor in case.rows())
    return results(divided(world, case), x, grad)


def on_all_ranks(pool: Pool, case: Case) -> Found:
    """The ranks' blocks together."""
    found = pool.run(on_a_rank, case, ranks=case.ranks)
    blocks = {name: [torch.from_numpy(one[name]) for one in found] for name in found[0]}
    return {name: torch.cat(parts, -1).numpy() for name, parts in blocks.items()}


def differences(case: Case) -> str:
    """What sets a case apart."""
    return "-".join(str(getattr(case, one.name)) for one in fields(case) if getattr(case, one.name) != one.default)


CASES = [
    *(Case(kind, ranks) for kind in KINDS for ranks in (2, 3, 4)),
    *(Case(kind, shape=shape) for kind in KINDS for shape in ((), (7,), (1, 1), (2, 1, 3, 2), (2, 0))),
    *(Case(kind, width=1, ranks=2) for kind in KINDS),
    *(Case(kind, frozen=True) for kind in KINDS),
    *(Case(kind, mean=1e6, std=1e-2, ranks=4) for kind in ("rms", "rms-plus-one")),
]


@pytest.mark.parametrize("case", CASES, ids=differences)
def test_blocks_make_up_the_whole_norm(pool: Pool, case: Case) -> None:
    found, expected = on_all_ranks(pool, case), results(case.norm(), *case.rows())
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_same(found[name], wanted, name)


# ---- precision ---------------------------------------------------------------------------------------------


def error(found: Found, truth: Found, name: str) -> float:
    return float(((found[name] - truth[name]) ** 2).sum() ** 0.5 / (truth[name] ** 2).sum() ** 0.5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("width", [8, 128])
def test_a_layer_norm_far_from_zero_is_as_accurate_as_one_process_has_it(pool: Pool, ranks: int, width: int) -> None:
    """Of Σx² − (Σx)²/n nothing would be left: the mean is 10⁴ times the deviations from it, its square 10⁸ times."""
    case = Case("layer", ranks, (40,), width, mean=1e3, std=1e-1, dtype=torch.float32)
    truth = results(case.norm(), *case.rows())
    alone = results(case.norm().float(), *(tensor.float() for tensor in case.rows()))
    found = on_all_ranks(pool, case)
    for name in truth:
        assert error(found, truth, name) <= error(alone, truth, name) + 1e-7, name


@pytest.mark.parametrize("weights", [None, torch.float32], ids=["all", "activations"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["rms", "rms-plus-one", "layer"])
def test_half_precision_is_rounded_once(pool: Pool, kind: str, dtype: torch.dtype, weights: torch.dtype | None) -> None:
    """Against float64 on the same numbers: half a unit in the last place, and what float32 adds to it."""
    case = Case(kind, shape=(3, 4), dtype=dtype, weights=weights, mean=1.0)
    found, truth = on_all_ranks(pool, case), results(case.norm(), *case.rows())
    for name, wanted in truth.items():
        last = torch.finfo(weights or dtype if name in ("weight", "bias") else dtype)
        allowed = abs(wanted) * last.eps / 2 + 1e-5 * abs(wanted).max(-1, keepdims=True)
        assert (abs(found[name] - wanted) <= allowed).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_eps_that_is_not_said_is_that_of_the_whole_norm(pool: Pool, dtype: torch.dtype) -> None:
    """Of the dtype that statistics have, not of the input's; it matters where rows are small."""
    case = Case("rms-default-eps", dtype=dtype, std=1e-4 if dtype != torch.float64 else 1e-8)
    alone = results(case.norm().to(dtype), *(tensor.to(dtype) for tensor in case.rows()))
    found = on_all_ranks(pool, case)
    for name, wanted in alone.items():
        assert_same(found[name], wanted, name, tolerance=4 * torch.finfo(dtype).eps)


# ---- what is moved and kept --------------------------------------------------------------------------------


def words_and_calls(world: World, case: Case, needs_x: bool) -> list[tuple[float, int]]:
    """Of the forward and the backward pass."""
    ledger, found = world.ledger, []
    module, (x, grad) = divided(world, case), (block(tensor, world) for tensor in case.rows())
    y = module(x.requires_grad_(needs_x))
    for backward in (None, y.backward):
        if backward is not None:
            backward(grad)
        found.append((ledger.words("world", PURPOSE), ledger.calls()))
        ledger.clear()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
@pytest.mark.parametrize(("kind", "numbers"), [("rms", 1), ("rms-plus-one", 1), ("layer", 2)])
def test_one_collective_each_way_of_one_or_two_numbers_a_row(
    pool: Pool, kind: str, numbers: int, shape: tuple[int, ...], ranks: int
) -> None:
    rows, share = torch.Size(shape).numel(), (ranks - 1) / ranks
    summed = pytest.approx(2 * share * numbers * rows)
    gathered = pytest.approx(share * numbers * ranks * rows)
    forward = gathered if kind == "layer" else summed
    case = Case(kind, ranks, shape)
    assert pool.run(words_and_calls, case, True, ranks=ranks) == [[(forward, 1), (summed, 1)]] * ranks
    assert pool.run(words_and_calls, case, False, ranks=ranks) == [[(forward, 1), (0.0, 0)]] * ranks


def kept(world: World, case: Case) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    found: list[Any] = []
    x = block(case.rows()[0], world).to(case.dtype).requires_grad_()
    module = divided(world, case)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: found.append((one.dtype, tuple(one.shape))), lambda _: x):
        module(x)
    return found


@pytest.mark.parametrize(("kind", "statistics"), [("rms", 1), ("layer", 2)])
def test_the_input_as_it_is_and_the_statistics_are_kept(pool: Pool, kind: str, statistics: int) -> None:
    half, exact = torch.bfloat16, torch.float32
    expected = [(half, (2, 3, WIDTH)), *[(exact, (2, 3, 1))] * statistics, (half, (WIDTH,))]
    assert pool.run(kept, Case(kind, 2, dtype=half), ranks=2) == [expected] * 2


# ---- what takes the place of what --------------------------------------------------------------------------


def same_parameters(world: World, kind: str) -> bool:
    module = KINDS[kind](WIDTH * world.size)
    before = dict(module.named_parameters())
    after = dict(divided_norm(module, world.everyone).named_parameters())
    return list(before) == list(after) and all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_stay_what_they_are(pool: Pool, kind: str) -> None:
    assert pool.run(same_parameters, kind, ranks=2) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_the_norm_itself(kind: str) -> None:
    module = KINDS[kind](WIDTH)
    assert divided_norm(module, World().everyone) is module


class Centred(nn.RMSNorm):
    """A norm of someone's own."""


def refused(world: World) -> None:
    divided_norm(Centred(WIDTH), world.everyone)


def refused_of_two_dims(world: World) -> None:
    divided_norm(nn.LayerNorm((3, WIDTH)), world.everyone)


def test_a_norm_over_two_dims_cannot_be_divided(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"norm = LayerNorm of \(3, 5\): only norms over one dim"):
        pool.run(refused_of_two_dims, ranks=2)


def test_what_a_norm_computes_must_be_known(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"norm = Centred: .* over 2 ranks; use one of RMSNorm, RMSNormPlusOne"):
        pool.run(refused, ranks=2)
