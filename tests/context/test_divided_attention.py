"""Ranks that divide a sequence find what one finds that has all of it, and exchange what the formulas say."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_ranks import CASES, Case, plainly
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.context.interpreter import OverPositions
from shoal.context.two_level import DividedAttention
from shoal.context.zigzag import Division
from shoal.mesh import Mesh
from shoal.meter import Meter
from shoal.model.context import Context
from shoal.model.roles import Role
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

Array = np.ndarray[Any, Any]  # what workers send back: a tensor would have to stay alive there

KINDS = {
    "ring": (Division(1, 4), False),
    "gather": (Division(1, 4), True),
    "ulysses": (Division(4, 1), False),
    "2x2": (Division(2, 2), False),
    "gathered 2x2": (Division(2, 2), True),
}
RANKS = 4


def attention_of(world: World, kind: str, case: Case) -> tuple[DividedAttention, Context, Tensor]:
    """The attention of this rank, its context, and its places."""
    division, gather = KINDS[kind]
    mesh = Mesh((("cp", world.size),), world)
    on = OverPositions(Whole(), division, gather=gather)
    module = on.adapt(Role("attention"), nn.Identity(), mesh)
    assert isinstance(module, DividedAttention)
    places = torch.tensor(division.places(case.length, mesh.coords["cp"]))
    ctx = Context(None, length=case.length, places=places, documents=case.document_ids, window=case.window)
    return module, on.localise(ctx, mesh.coords), places


def part_of(case: Case, places: Tensor) -> list[Tensor]:
    """This rank's part of the inputs, with padding that must not matter."""
    found = []
    for one in case.inputs():
        part = one[:, :, places.clamp(max=case.length - 1)].clone()
        part[:, :, places >= case.length] = 7.0
        found.append(part)
    found[3][:, :, places >= case.length] = 0.0  # the gradient of padding
    return found


def divided(world: World, kind: str, case: Case) -> tuple[Array, list[Array], dict[str, float], dict[str, float]]:
    """The rank's places; its part of the result and of the gradients of queries, keys and values; the words that it
    received forward, and backward."""
    attention, ctx, places = attention_of(world, kind, case)
    q, k, v, grad = part_of(case, places)
    for one in (q, k, v):
        one.requires_grad_()
    world.ledger.clear()
    out = attention(q, k, v, ctx)
    forward = world.ledger.table()
    world.ledger.clear()
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    found = [one.detach().numpy().copy() for one in (out, *gradients)]
    return places.numpy().copy(), found, forward, world.ledger.table()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "share"), [*((name, True) for name in CASES), ("odd", False), ("documents in a window", False)]
)
def test_ranks_find_what_one_finds(name: str, share: bool, kind: str, pool: Pool) -> None:
    """With fewer heads of keys and values than ranks that exchange heads, too; and over gloo, as between machines."""
    case = CASES[name]
    expected = plainly(case)
    seen = 0
    for places, found, _, _ in pool.run(divided, kind, case, ranks=RANKS, share=share):
        real = places < case.length
        seen += real.sum()
        for one, whole in zip(found, expected, strict=True):
            np.testing.assert_allclose(one[:, :, real], whole.numpy()[:, :, places[real]], rtol=1e-11, atol=1e-12)
            assert np.isfinite(one).all(), "what is not a number would spread from the padding"
    assert seen == case.length


# ---- words -------------------------------------------------------------------------------------------------

S, B, D = 32, 2, 6


def of_ring(ranks: int, kv: int, length: int = S) -> tuple[float, float]:
    there = 2 * (ranks - 1) / ranks * length * kv * D * B
    return there, there + 2 * length * kv * D * B


def of_gather(ranks: int, kv: int, length: int = S) -> tuple[float, float]:
    there = 2 * (ranks - 1) / ranks * length * kv * D * B
    return there, 2 * there


def of_ulysses(ranks: int, kv: int, length: int = S) -> tuple[float, float]:
    each = (ranks - 1) / ranks**2 * length * D * B * (2 * 4 + 2 * max(kv, ranks))
    return each, each


def of_both(ring: Callable[..., tuple[float, float]]) -> Callable[[int, int], tuple[float, float]]:
    """Two ranks that exchange heads have half the positions each; round the ring goes what one has after that."""

    def words(ranks: int, kv: int) -> tuple[float, float]:
        assert ranks == 4
        inside, around = of_ulysses(2, kv, S // 2), ring(2, max(kv // 2, 1))
        return inside[0] + around[0], inside[1] + around[1]

    return words


FORMULAS = {
    "ring": of_ring,
    "gather": of_gather,
    "ulysses": of_ulysses,
    "2x2": of_both(of_ring),
    "gathered 2x2": of_both(of_gather),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_receive_the_words_of_the_formulas(kind: str, kv_heads: int, pool: Pool) -> None:
    """Forward and backward, on every rank; keys and values are never repeated round a ring."""
    case = Case(S, kv_heads=kv_heads, samples=B, head_dim=D)
    for _, _, forward, backward in pool.run(divided, kind, case, ranks=RANKS):
        expected = FORMULAS[kind](RANKS, kv_heads)
        assert (forward["cp/context"], backward["cp/context"]) == pytest.approx(expected, rel=1e-12)
        assert forward.keys() == backward.keys() == {"cp/context"}


def test_what_a_window_hides_does_not_travel(pool: Pool) -> None:
    """A window of a chunk's size: keys go to the neighbours of their chunks and no further."""
    whole = Case(S, samples=1)
    near = Case(S, samples=1, window=5)
    words = [
        sum(forward["cp/context"] for _, _, forward, _ in pool.run(divided, "ring", case, ranks=RANKS))
        for case in (whole, near)
    ]
    share = 2 * S // RANKS * whole.kv_heads * whole.head_dim
    assert words[0] == RANKS * (RANKS - 1) * share
    assert words[1] == (1 + 3 + 3 + 3) * share
    apart = Case(S, samples=1, documents=((4,) * 8,))
    for _, _, forward, backward in pool.run(divided, "ring", apart, ranks=RANKS):
        assert not forward.get("cp/context")
        assert not backward.get("cp/context")


# ---- bytes -------------------------------------------------------------------------------------------------


def of_a_long_text(world: World, kind: str, length: int, heads: int = 2) -> dict[str, tuple[int, int]]:
    """Bytes at the peak of either pass: in all, and of what comes from other ranks."""
    case = Case(length, heads=heads, kv_heads=1, head_dim=8, samples=1)
    attention, ctx, places = attention_of(world, kind, case)
    q, k, v, grad = (torch.randn(1, n, len(places), 8) for n in (heads, 1, 1, heads))
    for one in (q, k, v):
        one.requires_grad_()
    with Meter() as meter:
        with meter.phase("forward"):
            out = attention(q, k, v, ctx)
        deadline = time.monotonic() + 5
        while meter.live("communication") and time.monotonic() < deadline:
            time.sleep(0.01)  # what a thread of the backend lets go of
        with meter.phase("backward"):
            torch.autograd.grad(out, (q, k, v), grad)
        peaks = meter.peaks()
    return {phase: (meter.peak(phase), peaks[phase].get("communication", 0)) for phase in ("forward", "backward")}


@pytest.mark.parity
def test_32k_tokens_on_four_ranks_hold_neither_scores_nor_all_keys_and_values(pool: Pool) -> None:
    """Scores would be 2 GiB for a rank's queries of one head alone. Of keys and values a ring has two shares from other
    ranks at any moment, backward as many and two of gradients; gathered, all four."""
    length = 1 << 15
    share = 2 * length // RANKS * 8 * 4
    for found in pool.run(of_a_long_text, "ring", length, ranks=RANKS):
        assert found["forward"][1] <= 2 * share
        assert found["backward"][1] <= 4 * share
        assert found["backward"][0] < 16 * share, "8 MiB"
    for found in pool.run(of_a_long_text, "gather", length, ranks=RANKS):
        assert found["forward"][1] == 4 * share
