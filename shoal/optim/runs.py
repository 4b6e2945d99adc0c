"""What an optimizer is given: runs of parameters with their gradients and states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.optim.rounding import Rounding
from shoal.optim.treatment import Treatment
from shoal.placement import Piece

HALVES = (torch.bfloat16, torch.float16)
COPIED = 1 << 22


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive elements of parameters, flat, with ``states`` and gradients that lie alike and one ``treatment``.

    ``grads()`` is asked for at each update, as it need not be the same memory each time; the update may overwrite it.
    ``piece`` is set for an optimizer that works on whole matrices: the box of a logical matrix that the run is. ``key``
    names the run, alike on all ranks that hold the same one. Runs of a lower ``turn`` are updated first.
    """

    params: Tensor
    grads: Callable[[], Tensor]
    states: Mapping[str, Tensor]
    treatment: Treatment
    piece: Piece | None = None
    key: str = ""
    turn: int = 0
    copy: Tensor | None = None
    """Where the new parameters go besides, perhaps in another dtype."""


class Work(NamedTuple):
    """A run that is to be updated: its parameters and gradients as the optimizer computes with them."""

    run: Run
    params: Tensor
    grads: Tensor


def at_once(runs: Sequence[Run], rounding: Rounding) -> Iterator[list[Work]]:
    """All runs; but those whose parameters or gradients are in half precision, of which each needs copies in float32,
    as many at a time as have ``COPIED`` elements, or one. Copies of parameters are rounded back when the next are
    asked for."""
    plain, narrow = [], []
    for run in runs:
        grads = run.grads()
        if run.params.dtype in HALVES or grads.dtype in HALVES:
            narrow.append(run)
        else:
            plain.append(Work(run, run.params, grads))
    yield plain
    while narrow:
        ends = list(accumulate(run.params.numel() for run in narrow))
        count = max(1, bisect_right(ends, COPIED))
        together = [Work(run, run.params.float(), run.grads().float()) for run in narrow[:count]]
        yield together
        for run, params, _ in together:
            if params is not run.params:
                rounding.round_into(run.params, params, run.key)
        narrow = narrow[count:]
