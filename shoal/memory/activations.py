"""Activations that live elsewhere from a unit's forward pass to its backward pass (vDNN, Rhu et al. 2016).

What autograd keeps of a unit goes away as it is kept, and comes back when the backward pass has reached the unit after
it (from a disk, the one after that): one unit computes while the next one's activations arrive. What arrives is what
went, so results are the same to the last bit. A storage goes once, however many nodes keep views of it, and units that
keep the same one share what went.

Not everything goes: parameters, buffers and what a micro-batch brings along stay in memory anyway; what is small would
cost more to move than it frees. Nor does the model's last unit, whose backward pass follows at once. A backward pass
that takes units in another order finds everything, too: what has not been fetched is fetched when it is asked for.

A backward pass that leaves weights' gradients for later keeps what those are made of, once fetched, where it computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shoal.storage import stands_in

LEAST = 1 << 12
"""Bytes: a smaller storage stays."""

Run = Callable[[Tensor, Any], Tensor]
"""A unit as a function of its input and the micro-batch's context."""


class Coming(Protocol):
    """Bytes on their way back."""

    def wait(self) -> Tensor:
        """All of them, uint8 on the device, once they are there."""


class Away(Protocol):
    """Bytes that have gone, or are going. Their place is free for others when nothing refers to this."""

    def fetch(self) -> Coming:
        """Begin to bring them back, as often as one likes."""


class Elsewhere(Protocol):
    """Where activations go."""

    @property
    def ahead(self) -> int:
        """How many units before they are needed they are to be fetched."""

    def put(self, data: Tensor) -> Away:
        """Begin to move ``data``, uint8 [bytes], whose memory is free for others once nobody refers to it any more."""

    def next_unit(self) -> None:
        """A unit begins."""


def chosen(units: Sequence[int], fraction: float) -> list[int]:
    """⌈fraction · n⌉ of the n ``units``, the first among them, evenly spread: transfers have the others' time, too."""
    counts = [ceil(round(fraction * place, 9)) for place in range(len(units) + 1)]
    return [unit for unit, before, after in zip(units, counts, counts[1:], strict=False) if after > before]


class Offload:
    """Runs the units of one pipeline stage, which computes on ``device``; ``elsewhere`` keeps what they leave."""

    def __init__(self, elsewhere: Elsewhere, device: torch.device) -> None:
        self._elsewhere, self._device = elsewhere, device
        self._newest: _Visit | None = None

    def around(self, run: Run, layer: nn.Module, *, first: bool, goes: bool, given: bool = False) -> Run:
        """``run``, the unit that computes with ``layer``. Units of a stage run one after another, from its ``first``.

        ``goes`` says whether what is kept of it goes, ``given`` whether its input belongs to the batch.
        """

        def offloaded(x: Tensor, ctx: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return run(x, ctx)
            self._elsewhere.next_unit()
            visit = self._newest = _Visit(self._elsewhere, None if first else self._newest)
            if goes:
                staying = _storages([*layer.parameters(), *layer.buffers(), *([x] if given else [])])
                with saved_tensors_hooks(partial(self._pack, visit, staying), _unpack):
                    y = run(x, ctx)
            else:
                y = run(x, ctx)
            for output in tree_leaves(y):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(visit.reached)
            return y

        return offloaded

    def _pack(self, visit: _Visit, staying: Collection[int], tensor: Tensor) -> _View | _Here:
        storage = tensor.untyped_storage() if _plain(tensor) and tensor.device.type == self._device.type else None
        if storage is None or storage.nbytes() < LEAST or storage._cdata in staying:
            return _Here(tensor, tensor._version)
        shared: _Shared | None = getattr(storage, _GONE, _nothing)()
        if shared is None or shared.version != tensor._version:
            shared = _Shared(self._elsewhere.put(_all_of(tensor)), tensor._version)
            setattr(storage, _GONE, weakref.ref(shared))
        offset = int(tensor.storage_offset())
        return _View(visit.keep(shared), tensor.dtype, offset, tensor.size(), tensor.stride())


class _Visit:
    """A micro-batch's passes through a unit; ``before`` is the one through the unit before it in the stage. The graph
    refers to this, so this refers to nothing that does to the graph."""

    def __init__(self, elsewhere: Elsewhere, before: _Visit | None) -> None:
        self._elsewhere, self._before = elsewhere, before
        self._kept: dict[int, weakref.ref[_Kept]] = {}

    def keep(self, away: _Shared) -> _Kept:
        found = self._kept.get(id(away))
        kept = found() if found is not None else None
        if kept is None or kept.shared is not away:
            kept = _Kept(away)
            self._kept[id(away)] = weakref.ref(kept)
        return kept

    def reached(self, gradient: Tensor) -> None:
        """The backward pass comes to the unit."""
        self._elsewhere.next_unit()
        visit: _Visit | None = self
        for _ in range(1 + self._elsewhere.ahead):
            if visit is not None:
                visit.fetch()
                visit = visit._before

    def fetch(self) -> None:
        """Begin to bring back what autograd still keeps."""
        kept, self._kept = self._kept, {}
        for each in kept.values():
            if (one := each()) is not None:
                one.fetch()


class _Shared:
    """A storage that has gone, as it was after so many writes (``version``), for all units that keep it."""

    def __init__(self, away: Away, version: int) -> None:
        self._away, self.version = away, version
        self._here: weakref.ref[Coming] | None = None

    def fetch(self) -> Coming:
        coming = self._here() if self._here is not None else None
        if coming is None:
            coming = self._away.fetch()
            self._here = weakref.ref(coming)
        return coming


class _Kept:
    """The same for one unit. It is there as long as a node of the unit needs it: then it lets go of what has come."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self._coming: Coming | None = None

    def fetch(self) -> Coming:
        if self._coming is None:
            self._coming = self.shared.fetch()
        return self._coming


class _View(NamedTuple):
    """A tensor that a node keeps, of a storage that has gone."""

    kept: _Kept
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        data = self.kept.fetch().wait()
        whole = data[: len(data) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


class _Here(NamedTuple):
    """A tensor that stays, and how often it had been written to: under hooks, autograd does not look."""

    tensor: Tensor
    version: int


def _all_of(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``, as bytes, unknown to autograd."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)


def _storages(tensors: Sequence[object]) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors if isinstance(one, Tensor)}


_GONE = "gone"
"""The attribute of a storage that refers to what has gone of it."""


def _nothing() -> None:
    """Refers to nothing."""


def _plain(tensor: Tensor) -> bool:
    """Whether bytes and strides are all there is to know of it."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    known = type(tensor) is Tensor or (stands_in(tensor) and not isinstance(tensor, nn.Parameter))
    return known and strided and not (tensor.is_complex() or tensor.is_neg())


def _unpack(packed: _View | _Here) -> Tensor:
    if isinstance(packed, _View):
        return packed.tensor()
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{packed.tensor.dtype} {list(packed.tensor.shape)} is at version {packed.tensor._version}; "
            f"expected version {packed.version} instead"
        )
    return packed.tensor
