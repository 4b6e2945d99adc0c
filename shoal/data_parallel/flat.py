"""The memory of a bucket on one rank: the whole of it, where the model computes, and the part this rank updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.data_parallel.buckets import Bucket
from shoal.data_parallel.stowage import Away, Stowage
from shoal.errors import ConfigError
from shoal.meter import mark
from shoal.optim.runs import HALVES
from shoal.placement import Division, Fragment, Holders
from shoal.purposes import COMMUNICATION, GRADIENTS, PARAMETERS, STATES
from shoal.storage import same_place


class Zeros(Protocol):
    def __call__(self, size: int, /, *, dtype: torch.dtype) -> Tensor: ...


class Flat:
    """``params`` and ``grads`` are the whole bucket, flat; ``own_params``, ``own_grads``, ``masters`` and the
    optimizer's ``states`` are this rank's part of it.

    The optimizer works on ``masters``: the parameters themselves, or, where those are in half precision and it does not
    do without (``masters=False``), float32 copies that hold what half precision would round away (mixed precision,
    Micikevicius et al. 2018). Gradients add up in float32 too, unless ``half_grads`` leaves them in the parameters'
    precision. Masters are apart, too, in whichever precision, where the model may still compute with ``versions`` of
    the parameters that the optimizer has updated since (:meth:`move`).

    A bucket that does not train (``trains``) has parameters alone, and one whose gradients nobody shares (``grads`` is
    then empty, ``buffered`` false) leaves them where autograd makes them.

    The parameters' own data become views of ``params`` and take their initial values. What is not kept whole
    (``keep_params``, ``keep_grads``) loses its memory in :meth:`release_whole`; views of it that were made before stay
    valid, for autograd too, as its storage only shrinks and grows.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        keep_params: bool,
        keep_grads: bool,
        half_grads: bool = False,
        masters: bool = True,
        versions: bool = False,
        trains: bool = True,
        zeros: Zeros = torch.zeros,
        away: Away | None = None,
    ) -> None:
        """``zeros`` makes the memory of what is exchanged and never loses it (:meth:`shoal.comm.world.World.zeros`)."""
        self.bucket, self.trains = bucket, trains
        self.divided = len(bucket.shard) > 1
        wide = torch.float32 if bucket.dtype in HALVES else bucket.dtype
        self.stowage = stowage = Stowage(bucket, away, trains=trains, mixed=masters and wide != bucket.dtype)
        self.keep_params = (keep_params or not self.divided) and stowage.parked_to == 0
        self.keep_grads = (keep_grads or not self.divided) and not stowage.grads
        self.grad_dtype = bucket.dtype if half_grads else wide
        self.mixed = trains and (versions or stowage.apart)
        self.buffered = trains and (stowage.cut > 0 or not (bucket.alone and self.grad_dtype == bucket.dtype))
        mine = slice(bucket.low, bucket.high)
        plain = partial(torch.zeros, device=bucket.device)
        self._zeros = plain if bucket.alone else zeros
        gathered = zeros if self.keep_params and self.divided else plain
        exact = self._initial(wide if trains and masters else bucket.dtype, gathered)
        self.params = exact if exact.dtype == bucket.dtype else gathered(bucket.size, dtype=bucket.dtype).copy_(exact)
        for slot in bucket.slots:
            slot.held.parameter.data = slot.of(self.params)
        self.faces: Sequence[nn.Parameter] = [slot.held.parameter for slot in bucket.slots]
        """What modules have, parameter by parameter."""
        self.own_params = self.params[mine]
        self.masters = exact[mine][stowage.cut :].clone() if self.mixed else self.own_params[stowage.cut :]
        self.grads = self._gradients() if self.buffered else self.params.new_empty(0)
        self.own_grads = self.grads[mine] if self.buffered else self.grads
        self._aside: tuple[Tensor, Tensor] | None = None
        states = dict.fromkeys(bucket.states if trains else (), wide)
        self.states = {name: torch.zeros_like(self.masters, dtype=dtype) for name, dtype in states.items()}
        self._written = self._writes()
        stowage.fill(exact[mine], states, self)
        self._mark()

    def _mark(self) -> None:
        """Say what its memory is for: what is whole for a while alone is gathered from other ranks."""
        if self.mixed:
            mark(STATES, self.masters)
        mark(STATES, *self.states.values())
        mark(GRADIENTS, self.grads, self.own_grads)
        mark(PARAMETERS, self.own_params)
        mark(PARAMETERS if self.keep_params else COMMUNICATION, self.params)

    def _gradients(self) -> Tensor:
        make = self._zeros if self.keep_grads else partial(torch.zeros, device=self.bucket.device)
        return make(self.bucket.size, dtype=self.grad_dtype)

    def _initial(self, dtype: torch.dtype, zeros: Zeros) -> Tensor:
        values = zeros(self.bucket.size, dtype=dtype)
        with torch.no_grad():
            for slot in self.bucket.slots:
                slot.of(values).copy_(slot.held.values(dtype))
        return values

    def release_whole(self) -> None:
        """From here on, what is not kept whole is only this rank's part, except between :func:`open_` and
        :func:`close`."""
        if not self.keep_params:
            part = self.own_params[self.stowage.parked_to :]
            self.own_params = self._zeros(len(part), dtype=part.dtype).copy_(part)
            if not self.mixed:
                self.masters = self.own_params[self.stowage.cut - self.stowage.parked_to :]
            close(self.params)
        if not self.keep_grads:
            if self.divided:
                self.own_grads = self.own_grads.clone()
            close(self.grads)
            if self.stowage.grads:
                close(self.own_grads)
        self._mark()

    def swap(self) -> None:
        """Another buffer takes the place of the gradients', or takes it again: one keeps the sums of a batch while
        those of the next add up in the other."""
        if self._aside is None:
            fresh = self._gradients()
            mark(GRADIENTS, fresh)
            self._aside = fresh, fresh[self.bucket.low : self.bucket.high]
        (self.grads, self.own_grads), self._aside = self._aside, (self.grads, self.own_grads)

    def own_gradients(self, run: slice) -> Tensor:
        """Some of this rank's part of the gradients."""
        return self.own_grads[run]

    def move(self, params: Tensor, faces: Sequence[nn.Parameter]) -> None:
        """From here on the bucket is in ``params``, which has its size and, once it is published, its values; modules
        have the views ``faces`` of it."""
        self.params, self.own_params, self.faces = params, params[self.bucket.low : self.bucket.high], faces
        for slot in self.bucket.slots:
            slot.held.parameter.data = slot.of(params)
        mark(PARAMETERS, params)
        self.see()

    def lower_gradients(self, *, add: bool = False) -> None:
        """Sums of gradients, or of some that ``add`` to them, are there: what of them is to live on the host goes
        there, and the device keeps none of those that do."""
        self.stowage.lower_gradients(self.own_grads, add=add)
        if self.stowage.grads:
            close(self.grads)
            close(self.own_grads)

    def publish(self, *, fresh: bool = False) -> None:
        """What the optimizer has made of the masters is what the model computes with; of those on shelves too, if they
        are ``fresh`` or were updated with the rest."""
        if self.mixed:
            cut, parked_to = self.stowage.cut, self.stowage.parked_to
            for start, stop, kept in self.stowage.parked:  # of shelves, their own updates do
                if start >= cut:
                    kept.lower(self.masters[start - cut : stop - cut].to(self.params.dtype))
                    kept.settle()
            begin = max(cut, parked_to)
            self.own_params[begin - parked_to :].copy_(self.masters[begin - cut :])
        if fresh or self.stowage.by_matrix:
            for shelf in self.stowage.shelves:
                shelf.publish()
        self.see()

    def adopt(self) -> None:
        """What somebody has copied into a parameter meanwhile is what its master is from here on. A master that rounds
        to what is there already stays as it is."""
        if not (self.mixed or self.stowage.shelves):
            return
        for number in self.written():
            _, start, stop = self.bucket.slots[number]
            if is_open(self.params):
                for begin, masters in self.pieces("weight", start - self.bucket.low, stop - self.bucket.low):
                    there = self.params[self.bucket.low + begin :][: len(masters)].to(masters.device)
                    masters.copy_(torch.where(there == masters.to(there.dtype), masters, there.to(masters.dtype)))
        self.see()

    def pieces(self, kind: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Elements ``begin`` … ``end`` − 1 of this rank's part of the weights, as exact as they are kept, of the
        reduced gradients, or of an optimizer state, wherever they are: the first element and the contents of each
        piece, in order. Writing to one writes the model's."""
        end = self.bucket.high - self.bucket.low if end is None else end
        for start, stop, find in self._places(kind):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield first, find()[first - start : last - start]

    def _places(self, kind: str) -> Iterator[tuple[int, int, Callable[[], Tensor]]]:
        stowage, size = self.stowage, self.bucket.high - self.bucket.low
        if kind == "gradient":
            if not stowage.grads or is_open(self.own_grads):
                yield 0, size, lambda: self.own_grads
                return
            yield from ((shelf.at.start, shelf.at.stop, shelf.gradient) for shelf in stowage.shelves)
        elif kind == "weight" and not self.trains:
            yield from ((start, stop, kept.view) for start, stop, kept in stowage.parked)
            yield stowage.parked_to, size, lambda: self.own_params
        else:
            yield from ((shelf.at.start, shelf.at.stop, partial(shelf.view, kind)) for shelf in stowage.shelves)
            yield stowage.cut, size, lambda: self.masters if kind == "weight" else self.states[kind]

    def fragments(self, kind: str, divide: Callable[[Holders], Division]) -> Iterator[Fragment]:
        """The same as boxes of logical tensors."""
        for begin, contents in self.pieces(kind):
            yield from self.bucket.own_fragments(kind, contents, divide, begin)

    def see(self) -> None:
        """Whatever has been written to parameters until now is known."""
        self._written = self._writes()

    def written(self) -> Iterator[int]:
        """The slots to which somebody has written since: with versions all of the bucket, whose faces are views of one
        buffer for autograd too."""
        for number, (was, now) in enumerate(zip(self._written, self._writes(), strict=True)):
            if was != now:
                yield number

    def _writes(self) -> list[tuple[int, int]]:
        """How often each parameter has been written to by its own name, not by way of the buffer, and its face."""
        return [
            (slot.held.parameter._version, face._version)
            for slot, face in zip(self.bucket.slots, self.faces, strict=True)
        ]

    def check_views(self) -> None:
        """Raise :class:`ConfigError` unless what modules have still are views of the buffer, and train."""
        for (held, start, stop), face in zip(self.bucket.slots, self.faces, strict=True):
            if not face.requires_grad:
                raise ConfigError(f"Engine: {held.name} was frozen after the engine was made; do it before")
            if start == stop or not is_open(self.params):
                continue  # nothing there to have an address
            if not same_place(face, self.params, start):
                raise other_memory(held.name)

    def check_unwritten(self) -> None:
        """Raise :class:`ConfigError` if somebody has written to parameters."""
        for number in self.written():
            raise ConfigError(
                f"Engine: {self.bucket.slots[number].held.name}, or a parameter in one buffer with it, was written to "
                "while steps are under way that compute with what was there; call engine.drain() before writing"
            )


def other_memory(name: str) -> ConfigError:
    """A parameter is no longer where the layout has put it."""
    return ConfigError(
        f"Engine: {name} was given other memory after the engine was made (by .to(), .data or "
        "load_state_dict(assign=True)), where no update would reach it; change it before, or copy into it"
    )


def open_(flat: Tensor) -> None:
    """Give a flat buffer memory, with any contents."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def close(flat: Tensor) -> None:
    """Take a flat buffer's memory away."""
    flat.untyped_storage().resize_(0)


def is_open(flat: Tensor) -> bool:
    """Whether a flat buffer has memory."""
    return flat.untyped_storage().nbytes() > 0 or flat.numel() == 0
