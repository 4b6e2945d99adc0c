"""What a step moves and holds on this rank, told alike for Shoal and for what is built on ``torch.distributed``.

Words are counted as :mod:`shoal.comm.ledger` does: full sizes by the ring convention, whatever the backend makes of
them. (gloo has no reduce-scatter; those of DTensor and FSDP2 are all-reduces there, and move twice what is counted.)
Bytes are the storages alive at the worst moment: parameters, gradients, optimizer states, activations, workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.trainers import Step
from shoal.comm.ledger import Ledger
from shoal.data.batches import Batch
from shoal.meter import Meter


@dataclass(frozen=True)
class Counts:
    """Of one step on one rank: words received, and bytes held at its worst moment."""

    words: float
    peak_bytes: int


def count(step: Step, batches: Sequence[Batch], ledger: Ledger | None = None) -> Counts:
    """What the last of ``batches`` (two or more) takes: the meter knows what was there before from its first use.

    ``ledger`` is where the trainer itself enters what it receives; without one, what it hands to ``torch.distributed``
    is watched.
    """
    account = Ledger() if ledger is None else ledger
    with Meter() as meter, Collectives(account) if ledger is None else nullcontext():
        for batch in batches[:-1]:
            step(batch)
        before = account.words()
        with meter.phase("last"):
            step(batches[-1])
    return Counts(account.words() - before, meter.peak("last"))


class Collectives(TorchDispatchMode):
    """Enters in ``ledger`` the collectives that are called while it is entered.

    A DTensor has no storage of its own: it is let through, so that what it does with local tensors is seen, here and by
    a meter around.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, (DTensor, AsyncCollectiveTensor)) for one in types):
            return NotImplemented
        if op.namespace in ("c10d", "_c10d_functional"):
            self._enter(op, args)
        return op(*args, **(kwargs or {}))

    def _enter(self, op: OpOverload, args: tuple[Any, ...]) -> None:
        name = op._opname
        if name in SILENT:
            return
        collective, full_size = FULL_SIZE[name]
        ranks = next(size for size in map(_ranks, reversed(args)) if size)
        itemsize = next(leaf.itemsize for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        self._ledger.record(collective, full_size(args, ranks), ranks, "mesh", name, itemsize)


SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
FULL_SIZE: dict[str, tuple[str, Callable[[tuple[Any, ...], int], int]]] = {
    "all_reduce": ("all_reduce", lambda args, _: args[0].numel()),
    "all_reduce_": ("all_reduce", lambda args, _: args[0].numel()),
    "all_gather_into_tensor": ("all_gather", lambda args, ranks: args[0].numel() * ranks),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, _: args[0].numel()),
    "allreduce_": ("all_reduce", lambda args, _: sum(tensor.numel() for tensor in args[0])),
    "_allgather_base_": ("all_gather", lambda args, _: args[0].numel()),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, _: args[1].numel()),
}
"""For each operation, the collective that it is and the elements of its full tensor, from its arguments and ranks."""


def _ranks(argument: object) -> int:
    """How many ranks the process group ``argument``, or the one of that name, has; 0 where it is something else."""
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(argument).size()
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
        return dist.ProcessGroup.unbox(argument).size()
    return 0
