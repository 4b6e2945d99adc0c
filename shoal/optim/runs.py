"""What an optimizer is given: runs of parameters with their gradients and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.optim.treatment import Treatment
from shoal.placement import Piece


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
    """All runs with their gradients; but those whose gradients are in lower precision one by one, as each needs a
    copy."""
    given = [(run, run.grads()) for run in runs]
    yield [(run, grads) for run, grads in given if grads.dtype == run.params.dtype]
    for run, grads in given:
        if grads.dtype != run.params.dtype:
            yield [(run, grads.to(run.params.dtype))]
