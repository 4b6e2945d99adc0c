"""What an optimizer is given: runs of parameters with their gradients and states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from shoal.optim.treatment import Treatment
from shoal.placement import Piece

COPIED = 1 << 22


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive elements of parameters, flat, with ``states`` and gradients that lie alike and one ``treatment``.

    ``grads()`` is asked for at each update, as it need not be the same memory each time; the update may overwrite it.
    ``piece`` is set for an optimizer that works on whole matrices: the box of a logical matrix that the run is.
    """

    params: Tensor
    grads: Callable[[], Tensor]
    states: Mapping[str, Tensor]
    treatment: Treatment
    piece: Piece | None = None


def at_once(runs: Sequence[Run]) -> Iterator[list[tuple[Run, Tensor]]]:
    """All runs with their gradients; but those whose gradients are in lower precision, of which each needs a copy, as
    many at a time as have ``COPIED`` elements, or one."""
    yield [(run, grads) for run in runs if (grads := run.grads()).dtype == run.params.dtype]
    lower = [run for run in runs if run.grads().dtype != run.params.dtype]
    while lower:
        ends = list(accumulate(run.params.numel() for run in lower))
        count = max(1, bisect_right(ends, COPIED))
        yield [(run, run.grads().to(run.params.dtype)) for run in lower[:count]]
        lower = lower[count:]
