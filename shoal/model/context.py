"""What every layer may know of the micro-batch it works on: positions, documents, labels, keys for dropout.

It is made once per micro-batch, from the batch alone, so every pipeline stage can make it for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.config import Model as Shape
from shoal.errors import ConfigError, setting
from shoal.model.beside import Beside
from shoal.model.dropout import Noise
from shoal.model.loss import IGNORED
from shoal.model.rope import Rope, rope_tables, rotate

Batch = Mapping[str, Tensor]


@dataclass
class Cache:
    """Keys and values [samples, kv_heads, positions, features] that attention has seen, by the name of its block;
    ``length`` positions in all, once a batch has run."""

    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    length: int = 0

    def following(self, tokens: Tensor) -> Batch:
        """The batch of ``tokens`` [samples, positions] that follow what has been seen: a prompt, then one position at
        a time."""
        assert self.length == 0 or tokens.shape[1] == 1, "after the prompt, one position at a time"
        positions = self.length + torch.arange(tokens.shape[1], device=tokens.device)
        self.length += tokens.shape[1]
        return {"tokens": tokens, "positions": positions[None]}

    def extend(self, block: str, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append to what ``block`` has seen and return all of it that the new positions may see. Of a ``window`` only
        as much is kept as the next position sees besides itself."""
        if (before := self.kept.get(block)) is not None:
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        first = 0 if window is None else max(0, k.shape[2] - (window - 1))
        self.kept[block] = (k[:, :, first:], v[:, :, first:])
        return k, v


@dataclass
class Context:
    """``rope`` are the rotary angles, ``positions`` int64 [samples or 1, positions] the rows of a learned table: a
    model has one or the other. ``mask`` is bool [samples or 1, 1, positions, positions], True where attention may look,
    or None for plain causal attention."""

    rope: Rope | None
    positions: Tensor | None = None
    mask: Tensor | None = None
    labels: Tensor | None = None
    noise: Noise | None = None
    cache: Cache | None = None
    length: int = 0
    """How many positions a sample has, on all ranks that divide them together."""
    held: int = 0
    """How many of them are here before tensor parallelism divides them: all, or with their padding those of one rank of
    context parallelism."""
    places: Tensor | None = None
    """Which positions of the sample those here are: int64 [positions here], those from ``length`` on being padding.
    None for all of them, in order; [samples here, positions here] where rows of a grid have fewer samples than rows,
    and samples are parts of one."""
    documents: Tensor | None = None
    """int64 [samples, length], where ``places`` are divided: of all positions."""
    window: int | None = None
    blocks: Any = None
    """What attention does where positions are divided over ranks of context parallelism (:mod:`shoal.context`)."""
    samples: int = 0
    """How many there are, likewise."""
    newest: int | None = None
    """Of which of the positions here the logits are wanted; None for those of all."""
    counted: Tensor | None = None
    """int64 [samples]: by how many of its positions each of all samples counts in the loss."""
    beside: Beside = field(default_factory=Beside)

    def __post_init__(self) -> None:
        self.held = self.held or self.length

    @classmethod
    def of(
        cls,
        shape: Shape,
        dtype: torch.dtype,
        batch: Batch,
        noise: Noise | None = None,
        cache: Cache | None = None,
        *,
        newest: bool = False,
    ) -> Context:
        """What a decoder of ``shape`` and ``dtype`` may know of a batch. Raises :class:`ConfigError` where that has
        more positions, with what the ``cache`` has seen, than the model has learned."""
        tokens, positions, labels = batch["tokens"], batch["positions"], batch.get("labels")
        places, documents, held = batch.get("places"), batch.get("documents"), tokens.shape[1]
        length = held if places is None else int(batch["length"])
        learned, counted = shape.positions == "learned", batch.get("counted")
        if counted is None and labels is not None:
            counted = (labels != IGNORED).sum(1)
        if learned:
            check_room(shape, length if cache is None else cache.length)
        return cls(
            None if learned else rope_tables(positions, shape.turned_dim, shape.rope_theta, dtype, shape.rope_scaling),
            positions if learned else None,
            mask=attention_mask(tokens, documents, shape.window) if places is None else None,
            labels=labels,
            noise=noise,
            cache=cache,
            length=length,
            held=held,
            places=places,
            documents=None if places is None else documents,
            window=shape.window,
            samples=len(tokens),
            newest=length - 1 if newest else None,
            counted=counted,
        )

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys ``x`` [samples, positions, heads, features] at rotary positions, ``x`` itself without."""
        return x if self.rope is None else rotate(x, self.rope)

    def drop(self, x: Tensor, rate: float, site: str) -> Tensor:
        """Dropout of ``x`` at ``site`` while training, ``x`` itself otherwise."""
        return x if self.noise is None else self.noise.drop(x, rate, site)


def check_room(shape: Shape, length: int) -> None:
    """Raise :class:`ConfigError` where a text of ``length`` tokens has more positions than the model has learned."""
    if shape.positions == "learned" and length > shape.max_positions:
        problem = f"the model has learned no position for a text of {length} tokens"
        raise ConfigError(setting("model.max_positions", shape.max_positions, problem, "use a shorter text"))


def attention_mask(tokens: Tensor, documents: Tensor | None, window: int | None) -> Tensor | None:
    """Where attention may look: bool [samples or 1, 1, positions, positions], or None for all positions up to one's
    own.

    Each of the ``documents`` (int64 [samples, positions], if there are any) sees only itself, and a position the
    ``window`` last ones, its own included.
    """
    length = tokens.shape[1]
    windowed = window is not None and window < length
    if documents is None and not windowed:
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    if documents is None:
        return mask[None, None]
    return (documents[:, None, :, None] == documents[:, None, None, :]) & mask
