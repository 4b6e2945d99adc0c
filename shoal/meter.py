"""Live bytes by category and phase: what every memory claim reads.

torch keeps no statistics of its CPU allocator, so the meter watches the storages themselves. Each storage that an
operation makes while the meter is active enters the total once, however many views share it, and leaves it when the
storage is freed, whether Python or only autograd held it last. On CUDA the caching allocator has its own account:
:func:`cuda_peak`.

Who makes memory says what for (:func:`mark`), whether anybody counts it or not. What has been moved off the device is
host memory and enters no total: totals are those of the device, which on a machine without one is an account.

Not seen: scratch that one kernel takes and returns inside its own call, what the allocator rounds up, and what other
Python threads make (autograd's own threads are seen).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.purposes import ACTIVATIONS as ACTIVATIONS
from shoal.purposes import BUFFERS as BUFFERS
from shoal.purposes import HOST as HOST
from shoal.purposes import OUTSIDE as OUTSIDE
from shoal.purposes import WORKSPACE as WORKSPACE
from shoal.storage import tensors_in

ALL = "all"
"""The phase that is always open: its peak is the peak of the meter's whole life."""

_MARK = "made_for"
"""The attribute of a storage that has its mark."""
_PART = "part_of_host"
"""That of one on the host that has the category which its contents have on the device."""


def mark(category: str, *tensors: Tensor) -> None:
    """Say what the whole storages of ``tensors`` are for, to every meter that sees them from now on. A meter's own
    label for the same storage holds until there is another mark."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), _MARK, category)


def mark_host(part: str, *tensors: Tensor) -> None:
    """Say that the storages of ``tensors`` are :data:`HOST`, and what they are for: see :meth:`Meter.host_parts`."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), _PART, part)
    mark(HOST, *tensors)


def host_bytes(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Memory of the host for activations: uint8 [nbytes], with any contents, :data:`HOST` from the beginning."""
    with _disable_current_modes():  # a meter would see it before it is marked
        made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    mark_host(ACTIVATIONS, made)
    return made


class Meter:
    """Counts the bytes of live storages by category, and their peak in each phase, while it is entered.

    A storage belongs to the category it was last labelled (:meth:`label`) or marked (:func:`mark`) with, else to the
    one its maker implies (see :data:`ACTIVATIONS`, :data:`WORKSPACE`, :data:`OUTSIDE`). A label holds from then on:
    peaks already recorded keep the categories of their moment, so label gradients where they are made to find them in
    the peak of a backward.

    Backward passes, hooks, optimizers and collectives are seen like any other operation. All devices count together;
    meta and fake tensors count the bytes that they stand for, unless ``meta`` is false. Categories ``apart`` are not
    part of totals and peaks: what is there is somewhere else than the rest. Sparse tensors have no storage:
    an operation on one raises ``NotImplementedError``. After exit nothing new is counted, but what is freed still
    leaves the totals.

        with Meter() as meter:
            meter.label("params", model.parameters())
            with meter.phase("forward"):
                loss = model(batch)
            assert meter.live("activations") == 4 * saved_elements
    """

    def __init__(self, apart: Iterable[str] = (HOST,), *, meta: bool = True) -> None:
        self._apart, self._meta = tuple(apart), meta
        self._held: dict[int, _Held] = {}  # by the identity of the storage object, which lives as long as its memory
        self._freed: deque[_Held] = deque()
        self._live: Counter[str] = Counter()
        self._total = 0
        self._open: list[tuple[str, str]] = [(ALL, WORKSPACE)]  # (phase, category of what it makes), innermost last
        self._peaks: dict[str, tuple[int, dict[str, int]]] = {ALL: (0, {})}
        self._host: Counter[str] = Counter()
        self._host_peaks: dict[str, tuple[int, dict[str, int]]] = {ALL: (0, {})}
        self._active: ExitStack | None = None

    def __enter__(self) -> Self:
        assert self._active is None, "this meter is already counting"
        with ExitStack() as active:
            active.enter_context(_resizes_reported(self._resized))
            active.enter_context(_Watch(self))
            self._active = active.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._active is not None
        self._active.close()
        self._active = None

    @contextmanager
    def phase(self, name: str, category: str | None = None) -> Iterator[None]:
        """Open the phase ``name``: its peak includes what is already live on entry, over every visit to it.

        Storages made inside and not labelled fall under ``category``; by default :data:`ACTIVATIONS` when ``name`` is
        ``forward``, else :data:`WORKSPACE`. Phases nest: the outer one's peak covers the inner one, and the inner one
        decides the category.
        """
        made = category or (ACTIVATIONS if name == "forward" else WORKSPACE)
        self._open.append((name, made))
        self._record()
        try:
            yield
        finally:
            self._open.pop()

    def label(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Move the whole storages of ``tensors`` to ``category``, and count those not seen before from now on."""
        for tensor in tensors:
            held = self._see(tensor.untyped_storage(), category)
            self._move(held, category)
        self._record()

    def look(self) -> None:
        """Read all marks: else one that is made of a storage counts from when an operation uses that."""
        for held in list(self._held.values()):
            if (storage := held.storage()) is not None:
                self._see(storage, held.category)
        self._settle()

    def live(self, category: str | None = None) -> int:
        """Bytes alive now, in ``category`` or in all that are not apart."""
        self._settle()
        return self._counted() if category is None else self._live[category]

    def snapshot(self) -> dict[str, int]:
        """Bytes alive now, by category; a category that holds nothing is left out."""
        self._settle()
        return {category: nbytes for category, nbytes in self._live.items() if nbytes}

    def peak(self, phase: str = ALL) -> int:
        """Most bytes alive at one moment of ``phase``, but for those apart. Raises ``KeyError`` for a phase that was
        never opened."""
        return self._peaks[phase][0]

    def host_peak(self, phase: str = ALL) -> int:
        """Most bytes of :data:`HOST` alive at one moment of ``phase``, which is another moment, as a rule."""
        return self._host_peaks.get(phase, (0, {}))[0]

    def host_parts(self, phase: str | None = None) -> dict[str, int]:
        """Bytes of :data:`HOST` by what they are for, now, or at the last moment at which ``phase`` had most of them;
        together they are all of it."""
        self._settle()
        if phase is None:
            return {part: nbytes for part, nbytes in self._host.items() if nbytes}
        return dict(self._host_peaks.get(phase, (0, {}))[1])

    def peaks(self) -> dict[str, dict[str, int]]:
        """For every phase opened so far and :data:`ALL`: bytes by category at the last moment its peak was reached."""
        return {phase: dict(parts) for phase, (_, parts) in self._peaks.items()}

    def _used(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self._meta or not tensor.is_meta:
                self._see(tensor.untyped_storage(), OUTSIDE)

    def _made(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self._meta or not tensor.is_meta:
                self._see(tensor.untyped_storage(), self._open[-1][1])
        self._record()

    def _resized(self, storage: UntypedStorage) -> None:
        if self._find(storage):
            self._see(storage, OUTSIDE)
            self._record()

    def _find(self, storage: UntypedStorage) -> _Held | None:
        held = self._held.get(id(storage))
        return held if held is not None and held.storage() is storage else None

    def _see(self, storage: UntypedStorage, category: str) -> _Held:
        """The account of ``storage``, opened under ``category`` if it has none, at its present size."""
        held = self._find(storage)
        if held is None:
            held = self._held[id(storage)] = _Held(storage, self._freed, category)
        self._grow(held, storage.nbytes() - held.nbytes)
        made_for: str = getattr(storage, _MARK, held.mark)
        if made_for != held.mark:
            held.mark = made_for
            self._move(held, made_for, getattr(storage, _PART, held.part))
        return held

    def _move(self, held: _Held, category: str, part: str = BUFFERS) -> None:
        nbytes = held.nbytes
        self._grow(held, -nbytes)
        held.category, held.part = category, part
        self._grow(held, nbytes)

    def _grow(self, held: _Held, nbytes: int) -> None:
        held.nbytes += nbytes
        self._live[held.category] += nbytes
        if held.category == HOST:
            self._host[held.part] += nbytes
        self._total += nbytes

    def _settle(self) -> None:
        """Take the freed storages off the totals.

        A storage can die in the middle of any statement here, and on another thread, so its death only joins a queue.
        """
        while self._freed:
            held = self._freed.popleft()
            self._grow(held, -held.nbytes)
            if self._held.get(held.key) is held:  # else a newer storage already has this identity
                del self._held[held.key]

    def _counted(self) -> int:
        return self._total - sum(self._live[category] for category in self._apart)

    def _record(self) -> None:
        self._settle()
        total = self._counted()
        for phase, _ in self._open:
            if self._live[HOST] >= self.host_peak(phase):
                self._host_peaks[phase] = self._live[HOST], {part: n for part, n in self._host.items() if n}
            if phase not in self._peaks or total >= self._peaks[phase][0]:
                self._peaks[phase] = total, self.snapshot()


class _Held:
    """The account of one live storage; it joins ``freed`` when the storage dies."""

    __slots__ = ("category", "key", "mark", "nbytes", "part", "storage")

    def __init__(self, storage: UntypedStorage, freed: deque[_Held], category: str) -> None:
        self.storage = weakref.ref(storage, lambda _: freed.append(self))
        self.key, self.category, self.nbytes = id(storage), category, 0
        self.mark, self.part = "", BUFFERS


class _Watch(TorchDispatchMode):
    """Shows the meter the tensors that each operation takes and makes."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # true would import the whole compiler at the first operation: 70 MB beside what is measured

    def __torch_dispatch__(
        self, op: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op is not torch.ops.prim.device.default and op._can_decompose():
            with self:  # inference mode hands over composites whole: watch the parts, or their scratch goes unseen
                return op.decompose(*args, **kwargs)
        taken = tensors_in((args, kwargs))
        if op is not torch.ops.aten.lift_fresh.default:  # which only announces a tensor that was just made
            self._meter._used(taken)
        out = op(*args, **kwargs)
        self._meter._made([*taken, *tensors_in(out)])  # what it took, too: it may have been resized
        return out


@contextmanager
def _resizes_reported(report: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call ``report`` after every ``storage.resize_``, which is no operation: how ZeRO frees and regrows a weight."""
    resize = UntypedStorage.resize_

    def reporting(storage: UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        report(storage)
        return result

    UntypedStorage.resize_ = reporting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def cuda_peak(device: torch.device) -> int:
    """Most bytes that torch's allocator gave out on ``device`` since ``torch.cuda.reset_peak_memory_stats(device)``.

    Unlike a meter it counts what kernels use inside themselves and the rounding of each block.
    """
    return torch.cuda.max_memory_allocated(device)
