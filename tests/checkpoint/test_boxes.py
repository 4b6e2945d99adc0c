from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.boxes import cover, extents, intersect, subtract, text, within
from shoal.placement import Box

spans = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda span: (min(span), max(span)))
planes = st.tuples(spans, spans)


def points(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(start, stop) for start, stop in box)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(planes, planes)
def test_a_box_is_what_it_shares_with_another_and_the_rest_each_element_once(box: Box, other: Box) -> None:
    shared = intersect(box, other)
    assert set(points(shared) if shared else []) == set(points(box)) & set(points(other))
    if shared:
        together = [shared, *subtract(box, shared)]
        assert Counter(p for part in together for p in points(part)) == Counter(points(box))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(planes, st.lists(planes, max_size=5))
def test_cover_takes_each_element_once_from_a_part_that_holds_it(target: Box, parts: list[Box]) -> None:
    found, missing = cover(target, [(part, part) for part in parts])
    assert all(set(points(box)) <= set(points(part)) for box, part in found)
    held = {p for part in parts for p in points(part)}
    assert Counter(p for box, _ in found for p in points(box)) == Counter(set(points(target)) & held)
    assert Counter(p for box in missing for p in points(box)) == Counter(set(points(target)) - held)


def test_a_tensor_without_dims_is_one_box_of_one_element() -> None:
    assert extents(()) == ()
    assert cover((), [((), "a"), ((), "b")]) == ([((), "a")], [])
    assert cover((), []) == ([], [()])


def test_places_and_names() -> None:
    assert within(((4, 6), (1, 2)), ((4, 8), (0, 3))) == (slice(0, 2), slice(1, 2))
    assert text(((4, 6), (1, 2))) == "[4:6,1:2]"
