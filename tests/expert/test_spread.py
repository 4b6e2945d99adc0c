"""Where experts lie, and whose gradients are summed."""

from __future__ import annotations

import pytest

from shoal.errors import LayoutError
from shoal.expert.spread import Spread
from shoal.layout import Layout
from shoal.mesh import Grid
from shoal.model.roles import Role
from shoal.placement import Census, divide

GATE_UP = Role("expert", parts=(("gate", 5), ("up", 5)), experts=6, chosen=2)
DOWN = Role("expert_down", parts=(("down", 4),), experts=6, chosen=2)


def spread(line: str) -> tuple[Spread, Grid]:
    layout = Layout.parse(line)
    axes = tuple(axis for axis in layout.axes if axis[0] != "pp")
    return Spread(axes, 6, layout.ep, layout.etp), Grid(layout.axes)


def test_the_first_experts_are_on_one_rank_and_the_others_on_the_next() -> None:
    """Experts 1 to 3 of six on one device, 4 to 6 on the other."""
    found, grid = spread("dp=2,ep=2")
    rule = found.place(GATE_UP, "ffn.experts.gate_up", "weight", (60, 4))
    held = [{piece.name for piece in rule.at(grid.coords(rank)).pieces} for rank in range(2)]  # type: ignore[union-attr]
    assert held == [
        {f"ffn.experts.{e}.{part}.weight" for e in own for part in ("gate", "up")} for own in ((0, 1, 2), (3, 4, 5))
    ]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("dp=2,ep=2", [0]),
        ("dp=4,ep=2", [0, 2]),
        ("dp=2,tp=2,ep=2", [0, 2]),
        ("dp=2,tp=2", [0, 1, 2, 3]),
        ("dp=2,tp=2,etp=2", [0, 2]),
        ("dp=4,ep=2,etp=2", [0]),
        ("dp=3,tp=2,ep=3", [0, 3]),
        ("dp=2,tp=4:2d,ep=2", [0, 2, 4, 6]),
        ("dp=2,pp=2,ep=2", [0]),
    ],
)
@pytest.mark.parametrize(("role", "module", "shape"), [(GATE_UP, "gate_up", (60, 4)), (DOWN, "down", (24, 5))])
def test_those_sum_gradients_that_hold_the_same_part(
    line: str, first: list[int], role: Role, module: str, shape: tuple[int, int]
) -> None:
    found, grid = spread(line)
    rule = found.place(role, f"experts.{module}", "weight", shape)
    if line.startswith("dp=2,pp"):  # of one stage, as the engine has it
        grid = Grid(tuple(axis for axis in grid.axes if axis[0] != "pp"))
    for who in Census(rule, grid).holders(grid.coords(0)):
        assert list(who.summing) == list(who.copies) == first


def test_all_boxes_together_are_every_expert_once() -> None:
    found, grid = spread("dp=2,tp=2,ep=2,etp=2")
    for role, module, shape in ((GATE_UP, "gate_up", (60, 4)), (DOWN, "down", (24, 5))):
        rule = found.place(role, f"experts.{module}", "weight", shape)
        pieces = [piece for rank in range(4) for piece in rule.at(grid.coords(rank)).pieces]  # type: ignore[union-attr]
        assert sum(piece.numel for piece in pieces) == shape[0] * shape[1]
        assert len({(piece.name, piece.box) for piece in pieces}) == len(pieces)


def test_zero_divides_by_what_divides_the_fewer_holders_of_experts() -> None:
    """Three replicas of each expert, in a layout that divides over two."""
    found, grid = spread("dp=6,ep=2")
    (who, *_) = Census(found.place(DOWN, "experts.down", "weight", (24, 5)), grid).holders(grid.coords(0))
    assert who.copies == (0, 2, 4)
    assert divide(who, grid, 0, 2).shard == (0,)
    assert divide(who, grid, 0, 2).cross == (0, 2, 4)
    assert divide(who, grid, 2, 6).shard == (0, 2, 4)


def test_experts_that_servers_would_not_all_have_are_refused() -> None:
    from test_expert_layouts import read

    with pytest.raises(LayoutError, match=r"layout.ep = 2: servers have all experts, .*; use ep=1"):
        Layout.parse("dp=2,ep=2,sync=server").check(read().model, 8, 2)


def test_experts_that_do_not_divide_are_refused_with_legal_sizes() -> None:
    from test_expert_layouts import read

    with pytest.raises(LayoutError, match=r"layout.ep = 4: 6 experts do not divide over 4 ranks; use ep=2"):
        Layout.parse("dp=4,ep=4").check(read("model.experts=6").model, 8, 4)
