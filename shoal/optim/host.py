"""AdamW (Loshchilov & Hutter 2019) for states that live in host memory, in one pass over it.

An update has little to compute for the bytes that it touches: 28 a parameter, with float32 parameters and moments, bf16
gradients and a bf16 copy. So it takes as long as memory needs to move them, and every further pass, to scale gradients,
to convert them, to write the copy, takes its share again. The native step does all of it in one. Where it cannot be
built, PyTorch's fused AdamW does the update, with a conversion before it and one after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.optim.native import NotBuilt, library
from shoal.optim.runs import HALVES
from shoal.storage import stands_in

PIECE = 1 << 23
"""Elements that are updated at a time without native code, so that scaled gradients take little memory: 32 MiB."""

_KINDS = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
"""What the native step calls them."""


class Update(NamedTuple):
    """One step; see :func:`host_adamw`."""

    params: Tensor
    grads: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    factor: float = 1.0
    half: Tensor | None = None


def host_adamw(
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    half: Tensor | None = None,
) -> None:
    """Update ``params`` and both moments (float32 or float64) in place; all tensors are contiguous on the CPU, and
    alike in shape.

    ``grads`` (also bf16 or fp16) are multiplied by ``factor``, such as a clip factor over a loss scale, as they are
    read; they stay as they are. ``step`` counts updates from 1, this one included. ``half`` (bf16 or fp16), where it is
    given, becomes the parameters rounded to nearest, ties to even.

    Uses ``torch.get_num_threads()`` threads, and leaves the interpreter to others meanwhile. The first call on a
    machine builds the native step, which takes a few seconds.
    """
    (native() or plain)(Update(params, grads, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay, step, factor, half))


@cache
def native() -> Callable[[Update], None] | None:
    """The native step; None without a compiler, or where building fails, of which a warning tells."""
    try:
        function = library(Path(__file__).with_name("host_step.cpp")).host_adamw
    except NotBuilt as error:
        if error.tried:
            log = logging.getLogger("shoal")
            log.warning("warning: %s\nOptimizer steps on the host use PyTorch's kernels.", error)
        return None
    function.argtypes = [c_void_p] * 5 + [c_int64] + [c_int] * 4 + [c_double] * 5 + [c_int64, c_double]
    function.restype = None

    def run(update: Update) -> None:
        params, half = update.params, update.half
        tensors = [*update[:4], *([] if half is None else [half])]
        assert params.dtype in (torch.float32, torch.float64)
        assert all(state.dtype == params.dtype for state in (update.exp_avg, update.exp_avg_sq))
        assert half is None or half.dtype in HALVES
        assert all(one.shape == params.shape and one.is_contiguous() and one.is_cpu for one in tensors)
        if stands_in(params):
            return
        function(
            *(tensor.data_ptr() for tensor in update[:4]),
            None if half is None else half.data_ptr(),
            params.numel(),
            _KINDS[params.dtype],
            _KINDS[update.grads.dtype],
            0 if half is None else _KINDS[half.dtype],
            torch.get_num_threads(),
            update.lr,
            *update.betas,
            update.eps,
            update.weight_decay,
            update.step,
            update.factor,
        )

    return run


def plain(update: Update) -> None:
    """The step by PyTorch's kernels, piece by piece."""
    steps = [torch.tensor(float(update.step))]
    half = update.params if update.half is None else update.half
    room = torch.empty(min(PIECE, update.params.numel()), dtype=update.params.dtype)
    pieces = (tensor.view(-1).split(PIECE) for tensor in (*update[:4], half))
    for params, grads, exp_avg, exp_avg_sq, rounded in zip(*pieces, strict=True):
        torch._fused_adamw_(
            [params],
            [room[: len(grads)].copy_(grads).mul_(update.factor)],
            [exp_avg],
            [exp_avg_sq],
            [],
            steps,
            lr=update.lr,
            beta1=update.betas[0],
            beta2=update.betas[1],
            weight_decay=update.weight_decay,
            eps=update.eps,
            amsgrad=False,
            maximize=False,
        )
        if update.half is not None:
            rounded.copy_(params)
