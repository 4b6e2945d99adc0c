"""Blocks of scores are those that somebody may see, and keys travel no further than they are needed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.context.plan import Block, Plan, plan_of
from shoal.context.zigzag import Division
from shoal.model.context import attention_mask


def visible(length: int, padded: int, window: int | None, documents: Tensor | None) -> Tensor:
    """bool [samples or 1, padded, padded]: where attention looks, by the model's own mask."""
    full = documents
    if documents is not None:
        full = torch.cat([documents, documents[:, -1:].expand(-1, padded - length)], dim=1)
    if (mask := attention_mask(torch.zeros(1, padded), full, window)) is None:
        return torch.ones(1, padded, padded, dtype=torch.bool).tril()
    return mask[:, 0]


def covered(plan: Plan, division: Division, length: int, at: int) -> Tensor:
    """int [padded, padded]: how many blocks have each pair of places, of which a block that is not masked has those
    that it says."""

    def places(index: int) -> list[int]:
        return [place for span in division.spans(length, index) for place in range(*span)]

    padded = division.padded(length)
    found = torch.zeros(padded, padded, dtype=torch.int64)
    for source, blocks in enumerate(plan.blocks):
        for block in blocks:
            rows, columns = torch.tensor(places(at)[block.queries]), torch.tensor(places(source)[block.keys])
            pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
            found[rows[:, None], columns] += pairs if block.kind == "full" else pairs * (columns <= rows[:, None])
            if block.kind == "masked":
                assert (rows[0], columns[0]) == (block.first_query, block.first_key)
    return found


def not_masked(plan: Plan) -> list[Block]:
    return [block for blocks in plan.blocks for block in blocks if block.kind != "masked"]


@given(
    ring=st.sampled_from([1, 2, 3, 4]),
    length=st.integers(1, 40),
    window=st.none() | st.integers(1, 40),
    sizes=st.none() | st.lists(st.lists(st.integers(1, 15), min_size=3, max_size=8), min_size=1, max_size=2),
)
def test_blocks_are_those_that_somebody_sees(
    ring: int, length: int, window: int | None, sizes: list[list[int]] | None
) -> None:
    division = Division(1, ring)
    padded, documents = division.padded(length), None
    if sizes is not None:
        rows = [torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in sizes]
        longest = max(len(row) for row in rows)
        same = [torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows]
        documents = torch.stack(same)[:, :length]
        documents = torch.cat([documents, documents[:, -1:].expand(-1, length - documents.shape[1])], dim=1)
    plans = [plan_of(division, length, at, window, documents) for at in range(ring)]
    seen = visible(length, padded, None if window is not None and window >= length else window, documents)
    assert len({plan.hops for plan in plans}) == 1
    for at, plan in enumerate(plans):
        mine = torch.zeros(padded, 1, dtype=torch.bool)
        mine[[place for span in division.spans(length, at) for place in range(*span)]] = True
        pairs = covered(plan, division, length, at)
        assert pairs.max() <= 1, "a pair in two blocks would count twice"
        assert (pairs.bool() >= (seen & mine).any(0)).all(), "somebody sees what no block has"
        plain = Plan(tuple(tuple(b for b in blocks if b.kind != "masked") for blocks in plan.blocks), plan.hops)
        whole = covered(plain, division, length, at).bool()
        assert (whole <= seen.all(0)).all(), "a block without a mask has what somebody must not see"
        for source, blocks in enumerate(plan.blocks):
            assert not blocks or (at - source) % ring <= plan.hops[source]
    for source, hops in enumerate(plans[0].hops):
        assert hops == 0 or plans[(source + hops) % ring].blocks[source], "the last rank has no use for them"


def test_causal_attention_alone_needs_no_mask_and_everything_goes_all_the_way_round() -> None:
    plan = plan_of(Division(ring=4), 32, 1, 32, None)
    assert plan.hops == (3, 3, 3, 3)
    assert not_masked(plan) == [block for blocks in plan.blocks for block in blocks]
    assert [len(blocks) for blocks in plan.blocks] == [1, 1, 1, 1]


def test_what_the_window_or_documents_hide_is_not_sent() -> None:
    """In a window of one chunk a rank needs only the chunk before each of its own; and a document of one chunk ends
    there."""
    near = plan_of(Division(ring=4), 32, 0, 5, None)
    assert near.hops == (1, 3, 3, 3), "chunks 0, 7 | 1, 6 | 2, 5 | 3, 4: each is needed by the next"
    apart = plan_of(Division(ring=4), 32, 0, None, torch.arange(8).repeat_interleave(4)[None])
    assert apart.hops == (0, 0, 0, 0)
    assert [block.kind for block in apart.blocks[0]] == ["causal", "causal"]
    assert not any(apart.blocks[1:])
