"""Gates beside the formulas they stand for, a token and a sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, log

import pytest
import torch
from torch import Tensor

from shoal.model.gates import Gate, balance_loss, choose, keep, sinkhorn, weigh, z_loss

SOFTMAX = Gate("softmax", experts=6, chosen=2)


@pytest.fixture
def scores() -> Tensor:
    """[3 sequences, 7 positions, 6 experts]."""
    return torch.randn(3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def largest(row: Tensor, count: int) -> set[int]:
    return set(sorted(range(len(row)), key=lambda e: -float(row[e]))[:count])


def experts_of(chosen: Tensor) -> set[int]:
    return set(chosen.nonzero().flatten().tolist())


def each(scores: Tensor, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(scores.flatten(0, 1), chosen.flatten(0, 1), strict=True))


@pytest.mark.parametrize("kind", ["softmax", "topk-softmax", "sigmoid"])
def test_a_token_goes_to_the_experts_with_its_largest_scores(kind: str, scores: Tensor) -> None:
    gate = replace(SOFTMAX, kind=kind)
    for row, chosen in each(scores, choose(scores, gate)):
        assert experts_of(chosen) == largest(row, 2)


def test_weights_are_shares_of_all_experts_or_of_the_chosen(scores: Tensor) -> None:
    for renormalise, kind in ((False, "softmax"), (True, "softmax"), (False, "topk-softmax")):
        gate = Gate(kind, 6, 2, renormalise=renormalise, scale=2.5)  # type: ignore[arg-type]
        chosen = choose(scores, gate)
        for row, picked, weights in zip(
            scores.flatten(0, 1), chosen.flatten(0, 1), weigh(scores, chosen, gate).flatten(0, 1), strict=True
        ):
            among = experts_of(picked) if renormalise or kind == "topk-softmax" else range(6)
            total = sum(exp(row[e]) for e in among)
            for expert in range(6):
                expected = 2.5 * exp(row[expert]) / total if picked[expert] else 0.0
                assert float(weights[expert]) == pytest.approx(expected, rel=1e-12)


def test_a_bias_chooses_and_does_not_weigh(scores: Tensor) -> None:
    gate = replace(SOFTMAX, kind="sigmoid", renormalise=True)
    bias = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, -3.0])
    chosen = choose(scores, gate, bias)
    assert chosen[..., 2].all()
    assert not chosen[..., 5].any()
    weights = weigh(scores, chosen, gate)
    plain = scores.sigmoid() * chosen
    torch.testing.assert_close(weights, plain / plain.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_experts_come_from_the_best_groups(kind: str, scores: Tensor) -> None:
    gate = replace(SOFTMAX, kind=kind, groups=3, top_groups=1)
    for row, chosen in each(scores, choose(scores, gate)):
        of_groups = [row[0:2], row[2:4], row[4:6]]
        if kind == "sigmoid":
            best = max(range(3), key=lambda g: float(of_groups[g].sigmoid().sum()))
        else:
            best = max(range(3), key=lambda g: float(of_groups[g].max()))
        assert experts_of(chosen) == {2 * best, 2 * best + 1}


def test_sinkhorn_gives_each_token_as_much_and_each_expert_nearly(scores: Tensor) -> None:
    balanced = sinkhorn(scores)
    torch.testing.assert_close(balanced.sum(2), torch.full((3, 7), 1 / 7, dtype=torch.float64))
    torch.testing.assert_close(balanced.sum(1), torch.full((3, 6), 1 / 6, dtype=torch.float64), rtol=1e-2, atol=0.0)
    skewed = scores + torch.tensor([4.0, 0, 0, 0, 0, 0])
    uneven = choose(skewed, SOFTMAX).sum(1)
    assert choose(skewed, replace(SOFTMAX, kind="sinkhorn")).sum(1).max() < uneven.max()


def test_sinkhorn_balances_only_while_a_model_trains(scores: Tensor) -> None:
    """A token that is generated is alone in its sequence: balanced, all its scores are the same."""
    gate = replace(SOFTMAX, kind="sinkhorn").at_rest()
    assert not gate.looks_around
    assert torch.equal(choose(scores[:, 3:4], gate), choose(scores, gate)[:, 3:4])
    assert torch.equal(choose(scores, gate), choose(scores, SOFTMAX))


def test_an_expert_that_no_token_is_near_is_balanced_too() -> None:
    scores = torch.tensor([[[0.0, -400.0, 1.0], [2.0, -500.0, 0.0], [0.0, -450.0, 0.0]]])
    torch.testing.assert_close(sinkhorn(scores).sum(1), torch.full((1, 3), 1 / 3), rtol=0.1, atol=0.0)


def test_experts_choose_their_share_of_each_sequence(scores: Tensor) -> None:
    gate = replace(SOFTMAX, kind="expert-choice")
    chosen, probabilities = choose(scores, gate), scores.softmax(-1)
    places = ceil(2 * 7 / 6)
    for sequence in range(3):
        for expert in range(6):
            taken = experts_of(chosen[sequence, :, expert])
            assert taken == largest(probabilities[sequence, :, expert], places)


def test_capacity_keeps_the_first_positions_of_each_sequence(scores: Tensor) -> None:
    gate = replace(SOFTMAX, capacity=0.8)
    chosen = choose(scores, gate)
    kept = keep(chosen, gate)
    places = ceil(0.8 * 2 * 7 / 6)
    for sequence in range(3):
        for expert in range(6):
            wanted = chosen[sequence, :, expert].nonzero().flatten().tolist()
            assert kept[sequence, :, expert].nonzero().flatten().tolist() == wanted[:places]
    assert kept.sum() < chosen.sum()
    assert keep(chosen, SOFTMAX) is chosen


@pytest.mark.parametrize("kind", ["softmax", "sinkhorn", "expert-choice", "sigmoid"])
def test_one_sequence_does_not_see_another(kind: str, scores: Tensor) -> None:
    gate = replace(SOFTMAX, kind=kind, capacity=1.0)
    together = keep(choose(scores, gate), gate)
    apart = [keep(choose(one[None], gate), gate) for one in scores]
    assert torch.equal(together, torch.cat(apart))
    losses = balance_loss(scores, choose(scores, gate), gate)
    torch.testing.assert_close(losses[1], balance_loss(scores[1:2], choose(scores[1:2], gate), gate)[0])


def test_the_balance_loss_is_one_where_load_is_even_and_e_where_all_go_to_one() -> None:
    even = torch.zeros(1, 6, 6, dtype=torch.float64)
    chosen = torch.eye(6, dtype=torch.bool)[None]
    assert float(balance_loss(even, chosen, SOFTMAX)[0]) == pytest.approx(1.0)
    one = torch.zeros(1, 6, 6, dtype=torch.float64)
    one[..., 3] = 100.0
    first = replace(SOFTMAX, chosen=1)
    assert float(balance_loss(one, choose(one, first), first)[0]) == pytest.approx(6.0)


def test_the_z_loss_is_the_square_of_the_log_of_the_sum() -> None:
    assert float(z_loss(torch.zeros(1, 3, 6))[0]) == pytest.approx(log(6) ** 2)
