"""What the tests of engines share: what ranks hold, sent back and put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engine import Engine
from shoal.placement import Box, Fragment, assemble

Array = np.ndarray[Any, Any]  # what workers send back: a tensor would have to stay alive there


@dataclass(frozen=True)
class Held:
    """What one rank has of one logical tensor."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Array


def held(fragments: Iterable[Fragment], kind: str) -> list[Held]:
    """The fragments of one kind, in float64 (whole numbers too), as they are now."""
    return [
        Held(one.piece.name, one.piece.shape, one.piece.box, one.tensor.detach().double().numpy().copy())
        for one in fragments
        if one.kind == kind
    ]


def weights(engine: Engine) -> list[Held]:
    """What this rank has of every weight and buffer."""
    return held(engine.fragments(), "weight")


def put_together(ranks: Iterable[list[Held]]) -> dict[str, Tensor]:
    """Every tensor whole. All its boxes are there, and copies of a box agree in every bit."""
    boxes: dict[str, dict[Box, Array]] = {}
    shapes = {}
    for one in (one for of_rank in ranks for one in of_rank):
        first = boxes.setdefault(one.name, {}).setdefault(one.box, one.values)
        assert np.array_equal(first, one.values), f"{one.name} {one.box} differs between ranks"
        shapes[one.name] = one.shape
    full = {
        name: assemble(shapes[name], [(box, torch.from_numpy(values)) for box, values in parts.items()])
        for name, parts in boxes.items()
    }
    for name, tensor in full.items():
        assert not tensor.isnan().any(), f"some of {name} is held by no rank"
    return full


def equal(some: Sequence[Held], others: Sequence[Held]) -> bool:
    """Whether one rank has the same in both, bit for bit."""
    return len(some) == len(others) and all(
        (a.name, a.box) == (b.name, b.box) and np.array_equal(a.values, b.values)
        for a, b in zip(some, others, strict=True)
    )
