"""Where model states live that are not on the device: in the host's memory, or in a file on this machine's disk.

Copies between host and device run on streams of their own, one each way, with pinned memory: nothing waits for them but
what uses their results. Without a GPU the device is the same memory under another account, and the copies are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.process import return_freed_memory
from shoal.memory.buffers import Buffers
from shoal.memory.copies import Copies, Copy
from shoal.memory.swap import SECTOR, SwapFile, Transfer
from shoal.meter import mark_host


class Found(Protocol):
    """A tensor on the device that is not the same one at all times."""

    @property
    def tensor(self) -> Tensor: ...


class _Staged:
    """A tensor that is in a borrowed buffer while it is on the host."""

    def __init__(self, numel: int, dtype: torch.dtype, buffers: Buffers) -> None:
        self._numel, self._dtype, self._buffers = numel, dtype, buffers
        self.nbytes = -(-numel * dtype.itemsize // SECTOR) * SECTOR
        self._lent: Tensor | None = None

    @property
    def _bytes(self) -> Tensor:
        assert self._lent is not None, "used on the host without having been brought there"
        return self._lent[: self.nbytes]

    @property
    def _staged(self) -> Tensor:
        return self._bytes[: self._numel * self._dtype.itemsize].view(self._dtype)

    def _borrow(self) -> None:
        if self._lent is None:
            self._lent = self._buffers.take(self.nbytes)

    def _return(self) -> None:
        if self._lent is not None:
            self._buffers.give(self._lent)
            self._lent = None


class DeviceHome(_Staged):
    """Lives on the device; :class:`~shoal.optim.away.Kept`."""

    def __init__(self, found: Found, copies: Copies, buffers: Buffers) -> None:
        super().__init__(found.tensor.numel(), found.tensor.dtype, buffers)
        self._found, self._copies = found, copies
        self._under_way = Copy()

    def begin(self) -> None:
        if self._lent is None:
            self._borrow()
            self._under_way = self._copies.start(self._staged, self._found.tensor)

    def here(self) -> Tensor:
        self._under_way.wait()
        return self._staged

    def blank(self) -> Tensor:
        self._borrow()
        return self._staged

    def end(self, *, changed: bool = True) -> None:
        if changed:
            self._under_way = self._copies.start(self._found.tensor, self._staged)

    def settle(self) -> None:
        if self._lent is not None:
            self._under_way.wait()
            self._return()

    def lift(self, into: Tensor) -> Copy:
        into.copy_(self._found.tensor)
        return Copy()

    def lower(self, source: Tensor, *, add: bool = False) -> None:
        self._found.tensor.add_(source) if add else self._found.tensor.copy_(source)

    def view(self) -> Tensor:
        return self._found.tensor


class HostHome:
    """Lives in the host's memory, where it counts as ``part``; :class:`~shoal.optim.away.Kept`."""

    def __init__(self, values: Tensor, copies: Copies, buffers: Buffers, part: str) -> None:
        self._copies, self._buffers = copies, buffers
        self.tensor = torch.empty(len(values), dtype=values.dtype, pin_memory=values.is_cuda)
        mark_host(part, self.tensor)
        self.tensor.copy_(values)
        self._rising = self._sinking = Copy()
        self._more: _Staged | None = None

    def begin(self) -> None:
        """It is there already."""

    def here(self) -> Tensor:
        self._sinking.wait()
        if self._more is not None:
            self.tensor += self._more._staged
            self._more._return()
            self._more = None
        return self.tensor

    def blank(self) -> Tensor:
        self._rising.wait()
        return self.here()

    def end(self, *, changed: bool = True) -> None:
        """It is there still."""

    def settle(self) -> None:
        """It never left."""

    def lift(self, into: Tensor) -> Copy:
        self._rising = self._copies.start(into, self.here())
        return self._rising

    def lower(self, source: Tensor, *, add: bool = False) -> None:
        into = self.blank()
        if add:
            self._more = _Staged(len(source), source.dtype, self._buffers)
            self._more._borrow()
            into = self._more._staged
        self._sinking = self._copies.start(into, source)

    def view(self) -> Tensor:
        return self.here()


class DiskHome(_Staged):
    """Lives in a file, from byte ``offset`` on; :class:`~shoal.optim.away.Kept`."""

    def __init__(self, values: Tensor, swap: SwapFile, offset: int, copies: Copies, buffers: Buffers) -> None:
        super().__init__(len(values), values.dtype, buffers)
        self._swap, self._offset, self._copies = swap, offset, copies
        self._transfer: Transfer | None = None
        self._rising = Copy()
        self.lower(values)
        self.settle()

    def begin(self) -> None:
        if self._lent is None:
            self._borrow()
            self._transfer = self._swap.read(self._offset, self._bytes)

    def here(self) -> Tensor:
        self._finish()
        return self._staged

    def blank(self) -> Tensor:
        self.settle()
        self._borrow()
        return self._staged

    def end(self, *, changed: bool = True) -> None:
        self._finish()
        if changed:
            self._transfer = self._swap.write(self._offset, self._bytes)

    def settle(self) -> None:
        self._finish()
        self._rising.wait()
        self._return()

    def lift(self, into: Tensor) -> Copy:
        self.begin()
        self._rising = self._copies.start(into, self.here())
        return self._rising

    def lower(self, source: Tensor, *, add: bool = False) -> None:
        assert not add, "sums are kept in memory"
        into = self.blank()
        self._copies.start(into, source).wait()
        self.end()

    def view(self) -> Tensor:
        self.settle()
        contents = self._swap.mapping()[self._offset : self._offset + self._numel * self._dtype.itemsize]
        return contents.view(self._dtype)

    def _finish(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class Homes:
    """Keeps tensors on the host, or in a file in ``folder`` that nobody else sees and that goes with the process."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._copies, self._folder = Copies(device), folder
        self._buffers = Buffers(pinned=self._copies.pinned)
        self._swap: SwapFile | None = None
        self._end = 0
        self._on_host: list[HostHome] = []

    def reserve(self, nbytes: Sequence[int]) -> None:
        """Tensors of these sizes will be kept on disk. Raises :class:`~shoal.errors.ShoalError` without the room."""
        total = sum(-(-one // SECTOR) * SECTOR for one in nbytes)
        if total:
            self._swap = SwapFile(self._folder, total)
            return_freed_memory()

    def keep(self, where: str, values: Tensor, part: str) -> HostHome | DiskHome:
        """A tensor in ``where`` ("cpu" or "nvme"), which begins as a copy of ``values`` and is for ``part`` (see
        :mod:`shoal.purposes`)."""
        if where == "cpu":
            self._on_host.append(HostHome(values, self._copies, self._buffers, part))
            return self._on_host[-1]
        assert self._swap is not None
        made = DiskHome(values, self._swap, self._end, self._copies, self._buffers)
        self._end += made.nbytes
        return made

    def on_device(self, found: Found) -> DeviceHome:
        """What is on the device, to be used on the host."""
        return DeviceHome(found, self._copies, self._buffers)

    def rising(self) -> AbstractContextManager[object]:
        """What the device begins meanwhile comes after all copies to it that have begun, and waits for nothing else."""
        return self._copies.coming_in()

    def memory(self) -> list[Tensor]:
        """All that is in the host's memory of them, and what lies ready there for what comes and goes; and the file,
        once somebody has viewed what is in it."""
        mapped = [self._swap.mapping()] if self._swap is not None and self._swap.mapped else []
        return [*(one.tensor for one in self._on_host), *self._buffers.regions, *mapped]
