from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch import Tensor

from shoal.memory.buffers import ALIGNMENT, Buffers

MIB = 1 << 20


def held(buffers: Buffers) -> int:
    return sum(len(region) for region in buffers.regions)


@pytest.mark.parametrize("nbytes", [1, 100, ALIGNMENT, ALIGNMENT + 1, 3 * MIB + 5])
def test_a_buffer_is_aligned_and_as_long_as_asked_for(nbytes: int) -> None:
    buffers = Buffers()
    taken = [buffers.take(nbytes) for _ in range(3)]
    for number, one in enumerate(taken):
        assert (one.dtype, one.shape, one.data_ptr() % ALIGNMENT) == (torch.uint8, (nbytes,), 0)
        one.fill_(number)
    assert [one.unique().tolist() for one in taken] == [[0], [1], [2]]


def test_what_came_back_is_lent_again_and_nothing_more_is_mapped() -> None:
    buffers = Buffers(MIB)
    for _ in range(100):
        taken = [buffers.take(MIB // 4) for _ in range(4)]
        for one in taken:
            buffers.give(one)
    assert held(buffers) == MIB
    whole = buffers.take(MIB)  # the parts have become one again
    assert held(buffers) == MIB
    buffers.give(whole)


def test_it_grows_only_when_nothing_free_is_large_enough() -> None:
    buffers = Buffers()
    first = buffers.take(2 * MIB)
    second = buffers.take(MIB)
    assert held(buffers) == 3 * MIB
    buffers.give(first)
    small, rest = buffers.take(MIB), buffers.take(MIB)
    assert held(buffers) == 3 * MIB
    for one in (small, rest, second):
        buffers.give(one)
    buffers.take(2 * MIB + 1)
    assert held(buffers) == 5 * MIB + ALIGNMENT


def test_no_two_lent_at_once_overlap_in_any_order() -> None:
    draw = random.Random(0)
    buffers, lent = Buffers(64 * ALIGNMENT), dict[int, Tensor]()
    for number in range(2000):
        if lent and draw.random() < 0.5:
            name, tensor = draw.choice(list(lent.items()))
            assert bool((tensor == name).all())
            buffers.give(lent.pop(name))
        else:
            name = number % 251
            if name not in lent:
                lent[name] = buffers.take(draw.randrange(1, 6 * ALIGNMENT)).fill_(name)
    for name, tensor in lent.items():
        assert bool((tensor == name).all())
        buffers.give(tensor)
    assert held(buffers) < 2000 * ALIGNMENT
    mapped = held(buffers)
    for region in buffers.regions:
        assert len(buffers.take(len(region))) == len(region)
    assert held(buffers) == mapped


def test_a_buffer_cannot_be_given_twice() -> None:
    buffers = Buffers()
    one = buffers.take(10)
    buffers.give(one)
    with pytest.raises(KeyError):
        buffers.give(one)


def test_memory_goes_with_the_pool_and_what_it_lent() -> None:
    buffers = Buffers(MIB)
    storage = weakref.ref(buffers.regions[0].untyped_storage())
    buffers.give(buffers.take(MIB))
    buffers.close()
    assert buffers.regions == ()
    assert storage() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to pin memory for")
def test_pinned_regions() -> None:
    buffers = Buffers(MIB, pinned=True)
    one = buffers.take(100)
    assert one.is_pinned()
    buffers.give(one)
    buffers.close()
