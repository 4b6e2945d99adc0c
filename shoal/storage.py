"""Where the memory of a tensor is, and whether there is any: a tensor may only stand for one that had some.

Stand-ins have a shape, a dtype, a device and a storage of so many bytes, and no address: what wants to know whether two
tensors lie in one place asks here.
"""

from __future__ import annotations

from torch import Tensor


def stands_in(tensor: Tensor) -> bool:
    """Whether nothing is behind ``tensor``, wherever it says that it is."""
    return tensor.untyped_storage().device.type == "meta"


def same_place(one: Tensor, other: Tensor, start: int = 0) -> bool:
    """Whether ``one`` begins at element ``start`` of ``other``, in the same memory."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset() + start
    )


def tensors_in(values: object) -> list[Tensor]:
    """Those in tuples, lists and values of dictionaries of any depth: what an operation takes or makes."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]
