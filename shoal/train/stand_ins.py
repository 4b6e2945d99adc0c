"""Tensors that only stand for some: shapes, dtypes and bytes as on a CPU, without memory, and operations that compute
nothing.

They are PyTorch's fake tensors, which take the way of real ones through autograd, down to the shapes that each kernel
makes. What a program decides by stays real, so that it goes the way that it would go: whole numbers, as long as they
are few, and whatever is made of real tensors alone, such as a batch. A number that nobody knows, because it comes from
a stand-in, is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.storage import tensors_in

MOST_REAL = 1 << 20
"""Elements of a real tensor, at most: what is larger is a stand-in, whatever it is made of."""

_META = torch.device("meta")
"""Of a model that nobody has a part of yet: its tensors are left as they are."""

_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class StandIns(TorchDispatchMode):
    """While it is entered, what operations make are stand-ins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # true would import the whole compiler at the first operation

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.prim.device.default:  # which is asked for more often than anything else
            return args[0].fake_device if isinstance(args[0], FakeTensor) else op(*args)
        kwargs = kwargs or {}
        taken = tensors_in((args, kwargs))
        if any(isinstance(one, FakeTensor) for one in taken):
            if op is torch.ops.aten._local_scalar_dense.default:
                return _unknown(taken[0])
            return self._fake.dispatch(op, types, args, kwargs)
        if kwargs.get("device") == _META or any(one.is_meta for one in taken):
            return op(*args, **kwargs)
        made = op is torch.ops.aten.lift_fresh.default  # which announces a real tensor that has just been made
        if taken and not made and (op.is_view or op._schema.is_mutable or not _DEPENDS_ON_VALUES.isdisjoint(op.tags)):
            return op(*args, **kwargs)
        found = self._fake.dispatch(op, types, args, kwargs)
        real = all(
            one.numel() <= MOST_REAL and ((taken and not made) or not one.is_floating_point())
            for one in tensors_in(found)
        )
        return op(*args, **kwargs) if real else found


def _unknown(scalar: Tensor) -> float | int | bool:
    """The value of a stand-in of one element."""
    if scalar.is_floating_point():
        return 0.0
    return False if scalar.dtype == torch.bool else 0
