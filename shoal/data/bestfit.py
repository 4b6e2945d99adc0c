"""Best-fit decreasing: which items share a bin, so that few bins are needed and no item is cut."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]


def best_fit(lengths: _Ints, capacity: int) -> _Ints:
    """The bin (int64, counted from 0 without gaps) of each item.

    Items go, the longest first, into the fullest bin that still has room, or else into a new one (Johnson 1973; for
    training samples: Ding et al., "Fewer truncations improve language modeling", 2024). ``lengths`` (int64) lie in
    [1, capacity]; the sum of those in one bin is at most ``capacity``. It is a function of its arguments alone.

    Bins with equal room are alike, so that all items of one length are placed bin group by bin group: the time depends
    on how many different lengths there are, not on how many items.
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity), "length outside [1, capacity]"
    placed = np.empty(len(lengths), np.int64)
    bins = 0
    open_: dict[int, _Ints] = {}
    rooms: list[int] = []  # the keys of open_, rising
    by_length = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[by_length], return_index=True)
    for size, items in zip((-sizes).tolist(), np.split(by_length, firsts)[1:], strict=True):
        while len(items):
            at = bisect_left(rooms, size)
            room = rooms.pop(at) if at < len(rooms) else capacity
            each = room // size
            needed = -(-len(items) // each)
            if room in open_:
                group = open_.pop(room)
            else:
                group, bins = np.arange(bins, bins + needed), bins + needed
            used, rest = group[:needed], group[needed:]
            here, items = items[: len(used) * each], items[len(used) * each :]
            placed[here] = np.repeat(used, each)[: len(here)]
            last = len(here) - (len(used) - 1) * each
            for left, some in ((room, rest), (room - each * size, used[:-1]), (room - last * size, used[-1:])):
                if left and len(some):
                    if left not in open_:
                        insort(rooms, left)
                        open_[left] = some
                    else:
                        open_[left] = np.concatenate([open_[left], some])
    return placed
