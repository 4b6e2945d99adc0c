"""A weight's gradient as its parameter's ``grad``, where no buffer waits for it: the tensor that was made first is
kept, and later contributions are added to it, which saves a pass over memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Contribution = Callable[[], None]
"""Makes a part of a weight's gradient, and enters it."""


class Deferred:
    """Contributions that are to be made later, while there is a place for them (``kept``), which a backward pass that
    makes the gradients of inputs alone sets (Qi et al. 2023, 2401.10241)."""

    def __init__(self) -> None:
        self.kept: list[Contribution] | None = None

    def keep(self, contribution: Contribution) -> bool:
        """Whether a contribution now waits; else it is to be made at once."""
        if self.kept is None:
            return False
        self.kept.append(contribution)
        return True


def add(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add ``gradient`` (given up)."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def add_scaled(parameter: nn.Parameter, gradient: Tensor, scale: Tensor) -> None:
    """Add ``gradient`` times a scalar."""
    add(parameter, (gradient * scale).to(parameter.dtype))


def add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ·right, [out, in], of ``left`` [rows, out] and ``right`` [rows, in]."""
    if parameter.grad is None:
        parameter.grad = left.t() @ right
    else:
        parameter.grad.addmm_(left.t(), right)
