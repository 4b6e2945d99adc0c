"""A block of attention at a time is attention, whatever the blocks."""

from __future__ import annotations

from math import log

import pytest
import torch
from attention_ranks import CASES, Case, plainly
from torch import Tensor

from shoal.context import blocks as blocks_module
from shoal.context.blocks import Result, Saved, attend, attend_backward
from shoal.context.plan import Block, Kind, Sight, plan_of
from shoal.context.zigzag import Division, padded_documents
from shoal.meter import Meter


def test_two_results_merge_into_that_of_all_keys() -> None:
    """One query of 1 with keys 0, ln 2, ln 3, ln 4 and values 1, 2, 3, 4, two at a time."""
    q = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    kv = torch.tensor([[0.0, log(2), log(3), log(4)], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)[
        :, None, None, :, None
    ]
    first, second, both = (Result.of_nothing(q) for _ in range(3))
    halves = [Block(slice(0, 1), slice(start, start + 2), "full") for start in (0, 2)]
    attend(q, kv, halves[0], Sight(), first)
    attend(q, kv, halves[1], Sight(), second)
    assert (first.out.item(), first.lse.item()) == pytest.approx((5 / 3, log(3)))
    assert (second.out.item(), second.lse.item()) == pytest.approx((25 / 7, log(7)))
    for block in halves:
        attend(q, kv, block, Sight(), both)
    assert (both.out.item(), both.lse.item()) == pytest.approx((3.0, log(10)))


def test_a_query_that_sees_no_key_of_a_block_stays_as_it_is() -> None:
    q = torch.randn(1, 1, 2, 3, 4)
    result = Result.of_nothing(q)
    everything = (slice(None),) * 4
    result.merge(everything, torch.randn_like(q), torch.full((1, 1, 2, 3), -torch.inf))
    assert not result.out.any()
    assert (result.lse == -torch.inf).all()
    found, lse = torch.randn_like(q), torch.randn(1, 1, 2, 3)
    result.merge(everything, found, lse)
    assert torch.equal(result.out, found)
    assert torch.equal(result.lse, lse)


def test_what_is_not_a_number_stays_so() -> None:
    """In plain arithmetic: torch's kernels make zeros of it."""
    q = torch.full((1, 1, 1, 4, 2), torch.nan)
    result = Result.of_nothing(q)
    attend(q, torch.ones(2, 1, 1, 4, 2), Block(slice(0, 4), slice(0, 4), "masked"), Sight(3), result)
    assert result.out.isnan().all()


def together(case: Case, ring: int, monkeypatch: pytest.MonkeyPatch, *, kernel: bool) -> list[Tensor]:
    """The result and gradients of all places of a ring, one after another in this process."""
    if not kernel:
        monkeypatch.setattr(blocks_module, "_has_kernel", lambda _: False)
    division, documents = Division(ring=ring), case.document_ids
    padded = division.padded(case.length)
    q, k, v, grad = (torch.nn.functional.pad(x, (0, 0, 0, padded - case.length)) for x in case.inputs())
    q, grad = (x.unflatten(1, (case.kv_heads, -1)) for x in (q, grad))
    kv, dkv = torch.stack((k, v)), torch.zeros(2, *k.shape, dtype=k.dtype)
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    places = [torch.tensor(division.places(case.length, at)) for at in range(ring)]
    for at, mine in enumerate(places):
        plan = plan_of(division, case.length, at, case.window, documents)
        here, result = q[..., mine, :], Result.of_nothing(q[..., mine, :])
        for theirs, blocks in zip(places, plan.blocks, strict=True):
            for block in blocks:
                attend(here, kv[..., theirs, :], block, plan.sight, result)
        saved, found = Saved(here, result.out, result.lse, grad[..., mine, :]), torch.zeros_like(here)
        for theirs, blocks in zip(places, plan.blocks, strict=True):
            of_theirs = torch.zeros_like(kv[..., theirs, :])
            for block in blocks:
                attend_backward(saved, kv[..., theirs, :], block, plan.sight, found, of_theirs)
            dkv[..., theirs, :] += of_theirs
        out[..., mine, :], dq[..., mine, :] = result.out, found
    return [x[..., : case.length, :] for x in (out.flatten(1, 2), dq.flatten(1, 2), dkv[0], dkv[1])]


@pytest.mark.parametrize("kernel", [True, False], ids=["kernels", "plain arithmetic"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ring", [1, 2, 3])
def test_blocks_are_attention(ring: int, name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels and without, a few rows at a time."""
    monkeypatch.setattr(blocks_module, "CHUNK", 300)
    for found, expected in zip(
        together(CASES[name], ring, monkeypatch, kernel=kernel), plainly(CASES[name]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_in_half_precision_merge_in_float32(dtype: torch.dtype) -> None:
    """Sixteen blocks are no further from float64 than one."""
    torch.manual_seed(0)
    q, kv = torch.randn(1, 1, 2, 64, 8, dtype=dtype), torch.randn(2, 1, 1, 64, 8, dtype=dtype)
    errors = []
    exact = (q.double() @ kv[0].double().mT.unsqueeze(2) * 8**-0.5).softmax(-1) @ kv[1].double().unsqueeze(2)
    for size in (64, 4):
        result = Result.of_nothing(q)
        for start in range(0, 64, size):
            attend(q, kv, Block(slice(0, 64), slice(start, start + size), "full"), Sight(), result)
        assert result.out.dtype == result.lse.dtype == torch.float32
        errors.append((result.out - exact).abs().max().item())
    assert errors[1] < 3 * max(errors[0], torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_no_block_is_ever_held_whole(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 queries and as many keys: 32 MiB of scores in float64, of which plain arithmetic has 1 MiB at a time."""
    length = 2048
    q, kv = torch.randn(1, 1, 1, length, 4).double(), torch.randn(2, 1, 1, length, 4).double()
    documents = padded_documents(torch.zeros(1, length, dtype=torch.int64), length)
    for kernel in (True, False):
        monkeypatch.setattr(blocks_module, "CHUNK", 1 << 17)
        monkeypatch.setattr(blocks_module, "_has_kernel", lambda _, kernel=kernel: kernel)
        block, sight = Block(slice(0, length), slice(0, length), kind), Sight(None, documents)
        with Meter() as meter:
            result = Result.of_nothing(q)
            attend(q, kv, block, sight, result)
            saved = Saved(q, result.out, result.lse, torch.ones_like(q))
            attend_backward(saved, kv, block, sight, torch.zeros_like(q), torch.zeros_like(kv))
            assert meter.peak() < 8 << 20
