"""What an optimizer is given of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from shoal.data_parallel.buckets import OwnBox
from shoal.data_parallel.entry import Main
from shoal.data_parallel.flat import Flat
from shoal.optim.runs import Run


def runs_of(flat: Flat, mains: Sequence[Main], turn: int) -> Iterator[Run]:
    """What is updated where it is: runs as long as may be where gradients are in one buffer, else of one parameter
    each; for an optimizer that works on whole matrices, of one box each, and with what of them is elsewhere."""
    cut = flat.stowage.cut
    if flat.stowage.by_matrix:
        for shelf in flat.stowage.shelves:
            yield from (replace(run, turn=turn) for run in shelf.remain())

    def apart(box: OwnBox) -> tuple[object, ...]:
        return box.treatment, flat.buffered or box.slot, box.piece if box.treatment.by_matrix else None

    for _, alike in groupby(flat.bucket.own_boxes(cut), key=apart):
        boxes = list(alike)
        first, last = boxes[0], boxes[-1]
        run, from_cut = slice(first.start, last.stop), slice(first.start - cut, last.stop - cut)
        states = {name: state[from_cut] for name, state in flat.states.items()}
        if flat.buffered:
            grads = partial(flat.own_gradients, run)
        else:
            start = flat.bucket.slots[first.slot].start
            grads = partial(mains[first.slot].elements, first.start - start, last.stop - start)
        piece = first.piece if first.treatment.by_matrix else None
        key = f"{flat.bucket.name}/{flat.bucket.low + first.start}"
        yield Run(flat.masters[from_cut], grads, states, first.treatment, piece, key, turn)
