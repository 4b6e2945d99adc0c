"""The memory of a bucket on one rank: the whole of it, where the model computes, and the part this rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shoal.data_parallel.buckets import Bucket
from shoal.errors import ConfigError
from shoal.meter import mark
from shoal.optim.runs import HALVES
from shoal.purposes import COMMUNICATION, GRADIENTS, PARAMETERS, STATES


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
    ) -> None:
        self.bucket = bucket
        undivided = len(bucket.shard) == 1
        self.keep_params, self.keep_grads = keep_params or undivided, keep_grads or undivided
        wide = torch.float32 if bucket.dtype in HALVES else bucket.dtype
        self.grad_dtype = bucket.dtype if half_grads else wide
        self.mixed = trains and (versions or (masters and wide != bucket.dtype))
        self.buffered = trains and not (bucket.alone and self.grad_dtype == bucket.dtype)
        mine = slice(bucket.low, bucket.high)
        exact = self._initial(wide if trains and masters else bucket.dtype)
        self.params = exact.to(bucket.dtype)
        for slot in bucket.slots:
            slot.held.parameter.data = slot.of(self.params)
        self.faces: Sequence[nn.Parameter] = [slot.held.parameter for slot in bucket.slots]
        """What modules have, parameter by parameter."""
        self.own_params = self.params[mine]
        self.masters = exact[mine].clone() if self.mixed else self.own_params
        self.grads = torch.zeros_like(self.params, dtype=self.grad_dtype) if self.buffered else self.params.new_empty(0)
        self.own_grads = self.grads[mine] if self.buffered else self.grads
        self._aside: tuple[Tensor, Tensor] | None = None
        self.states = {name: torch.zeros_like(self.masters, dtype=wide) for name in bucket.states} if trains else {}
        self._written = self._writes()
        self._mark()

    def _mark(self) -> None:
        """Say what its memory is for: what is whole for a while alone is gathered from other ranks."""
        if self.mixed:
            mark(STATES, self.masters)
        mark(STATES, *self.states.values())
        mark(GRADIENTS, self.grads, self.own_grads)
        mark(PARAMETERS, self.own_params)
        mark(PARAMETERS if self.keep_params else COMMUNICATION, self.params)

    def _initial(self, dtype: torch.dtype) -> Tensor:
        values = torch.zeros(self.bucket.size, dtype=dtype, device=self.bucket.device)
        with torch.no_grad():
            for slot in self.bucket.slots:
                slot.of(values).copy_(slot.held.values(dtype))
        return values

    def release_whole(self) -> None:
        """From here on, what is not kept whole is only this rank's part, except between :func:`open_` and
        :func:`close`."""
        if not self.keep_params:
            self.own_params = self.own_params.clone()
            if not self.mixed:
                self.masters = self.own_params
            close(self.params)
        if not self.keep_grads:
            self.own_grads = self.own_grads.clone()
            close(self.grads)
        self._mark()

    def swap(self) -> None:
        """Another buffer takes the place of the gradients', or takes it again: one keeps the sums of a batch while
        those of the next add up in the other."""
        if self._aside is None:
            fresh = torch.zeros_like(self.grads)
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

    def publish(self) -> None:
        """What the optimizer has made of the masters is what the model computes with."""
        if self.mixed:
            self.own_params.copy_(self.masters)
            self.see()

    def adopt(self) -> None:
        """What somebody has copied into a parameter meanwhile is what its master is from here on. A master that rounds
        to what is there already stays as it is."""
        if not self.mixed:
            return
        for number in self.written():
            _, start, stop = self.bucket.slots[number]
            first, last = max(start, self.bucket.low), min(stop, self.bucket.high)
            if first < last and is_open(self.params):
                there, master = self.params[first:last], self.masters[first - self.bucket.low : last - self.bucket.low]
                master.copy_(torch.where(there == master.to(there.dtype), master, there.to(master.dtype)))
        self.see()

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
            if face.data_ptr() != self.params.data_ptr() + start * self.params.element_size():
                raise ConfigError(
                    f"Engine: {held.name} was given other memory after the engine was made (by .to(), .data or "
                    "load_state_dict(assign=True)), where no update would reach it; change it before, or copy into it"
                )

    def check_unwritten(self) -> None:
        """Raise :class:`ConfigError` if somebody has written to parameters."""
        for number in self.written():
            raise ConfigError(
                f"Engine: {self.bucket.slots[number].held.name}, or a parameter in one buffer with it, was written to "
                "while steps are under way that compute with what was there; call engine.drain() before writing"
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
