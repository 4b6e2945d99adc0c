"""Colours of a picture: legible, told apart, and alike where the same is held."""

from __future__ import annotations

from itertools import combinations
from math import dist

import pytest
from layout_pictures import LAYOUTS, owned

from shoal.layout import Layout
from shoal.report.colours import Colours
from shoal.report.ownership import Ownership
from shoal.report.svg import INK, oklch


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("line", LAYOUTS)
def test_ink_is_legible_on_every_colour(line: str) -> None:
    everything = owned(line)
    colours = Colours(everything)
    for ranks in {share.ranks for one in everything.held for share in (*one.shares, *one.states)}:
        contrast = (luminance(colours.of(ranks)) + 0.05) / (luminance(INK) + 0.05)
        assert contrast > 5, (ranks, colours.of(ranks))


@pytest.mark.parametrize("line", [line for line in LAYOUTS if Layout.parse(line).ranks <= 64])
def test_what_different_ranks_hold_of_a_tensor_differs_in_colour(line: str) -> None:
    colours = Colours(owned(line))
    for one in owned(line).held:
        for shares in (one.shares, one.states):
            assert len({colours.of(share.ranks) for share in shares}) == len(shares), one.weight


def oklab(colour: str) -> tuple[float, float, float]:
    """Ottosson 2020."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    rgb = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]

    def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    cones = times(
        (
            (0.41222147, 0.53633254, 0.05144599),
            (0.21190350, 0.68069955, 0.10739696),
            (0.08830246, 0.28171884, 0.62997870),
        ),
        rgb,
    )
    lightness, a, b = times(
        (
            (0.21045426, 0.79361779, -0.00407205),
            (1.97799850, -2.42859221, 0.45059371),
            (0.02590404, 0.78277177, -0.80867577),
        ),
        [cone ** (1 / 3) for cone in cones],
    )
    return lightness, a, b


@pytest.mark.parametrize(
    ("line", "blocks"),
    [("tp=4:2d", 4), ("tp=8:2.5d", 4), ("tp=8:3d", 8), ("tp=8:4x1x2", 8), ("tp=9:2d", 9), ("tp=16:2d", 16),
     ("tp=16:4x2x2", 16), ("tp=16", 16)],
)  # fmt: skip
def test_places_of_a_grid_are_told_apart_by_eye(line: str, blocks: int) -> None:
    """Two colours side by side differ visibly from a distance of 0.02 on."""
    layout = Layout.parse(line)
    nothing = Ownership(layout, tuple(range(layout.ranks)), (), (), (range(0),), (0,), (), {})
    found = {Colours(nothing).of([rank]) for rank in nothing.ranks}
    assert len(found) == blocks
    assert min(dist(oklab(one), oklab(other)) for one, other in combinations(found, 2)) > 0.05


def test_depths_have_the_colours_of_the_blocks_that_they_share() -> None:
    plain, divided = Colours(owned("tp=8:2.5d")), Colours(owned("dp=2,tp=8:2.5d,zero=1"))
    assert [plain.of([rank]) for rank in range(4)] == [plain.of([rank]) for rank in range(4, 8)]
    assert plain.of([0, 4]) == plain.of([0])
    assert len({divided.of([rank]) for rank in range(16)}) == 16
    lightness = [oklab(divided.of([rank]))[0] for rank in (0, 4, 8, 12)]
    assert lightness == sorted(lightness, reverse=True)
    assert oklab(divided.of([0, 4, 8, 12])) == pytest.approx(oklab(plain.of([0])), abs=0.01)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tp=4:2d", "a colour for each place on row × col, paler for several, grey for all of them"),
        ("tp=8:4x1x2", "a colour for each place on a × c, paler for several, grey for all of them"),
        ("tp=8:2.5d", "a colour for each place on row × col, paler for several, grey for all of them"),
        ("dp=2,tp=8:2.5d,zero=1", "grey for all of them, lighter to darker by replica and depth"),
        ("dp=16,tp=8:2.5d,zero=1", "lighter to darker by depth"),
        ("dp=2,tp=4:2d,pp=2,zero=3,mb=2", "lighter to darker by replica"),
    ],
)
def test_the_key_says_what_colours_mean(line: str, words: str) -> None:
    assert Colours(owned(line)).key().endswith(words)


@pytest.mark.parametrize(
    ("colour", "expected"),
    [((1.0, 0.0, 0.0), "#ffffff"), ((0.0, 0.0, 0.0), "#000000"), ((0.62796, 0.25768, 29.234), "#ff0000"),
     ((0.86644, 0.29483, 142.495), "#00ff00"), ((0.45201, 0.31321, 264.052), "#0000ff")],
)  # fmt: skip
def test_oklch_is_what_it_is_defined_to_be(colour: tuple[float, float, float], expected: str) -> None:
    """The values of CSS Color 4."""
    found = [int(oklch(*colour)[at : at + 2], 16) for at in (1, 3, 5)]
    assert found == pytest.approx([int(expected[at : at + 2], 16) for at in (1, 3, 5)], abs=1)
