"""Which positions of a sample a rank has: the zigzag, in which causal attention is the same work for every rank.

A query at place p looks at p + 1 keys, so a rank with the last positions in a row would have almost twice the mean
work. R ranks of a ring cut a sample into 2R chunks instead, and rank r has chunks r and 2R − 1 − r: what the one lacks
the other has too much (zigzag, Llama 3 and ring-flash-attention). Where attention exchanges positions for heads over U
ranks as well (Ulysses), each of a ring's chunks is cut into U parts in a row, one a rank; without a ring there is one
chunk. A sample is padded to a multiple of 2·R·U positions (of U without a ring): its last position again, which no
other looks at, and which counts in no loss.

Rows of a tensor-parallel grid divide samples. Where a micro-batch has fewer, they divide positions instead, as more
places of the ring: the batch then is folded, each row's positions of all samples after those of the row before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.context import Batch
from shoal.model.loss import IGNORED

Span = tuple[int, int]


@dataclass(frozen=True)
class Division:
    """A sample's positions over ``ulysses`` · ``ring`` ranks, those of one Ulysses group in a row."""

    ulysses: int = 1
    ring: int = 1

    @property
    def chunks(self) -> int:
        """How many chunks of a sample one place of the ring has."""
        return 2 if self.ring > 1 else 1

    def padded(self, length: int) -> int:
        """How many positions a sample of ``length`` has with its padding."""
        multiple = self.ring * self.chunks * self.ulysses
        return -(-length // multiple) * multiple

    def spans(self, length: int, at: int) -> tuple[Span, ...]:
        """The chunks, as (first, past the last) place, of the ranks at place ``at`` of the ring together."""
        size = self.padded(length) // (self.ring * self.chunks)
        numbers = (at, 2 * self.ring - 1 - at)[: self.chunks]
        return tuple((number * size, (number + 1) * size) for number in numbers)

    def places(self, length: int, index: int) -> list[int]:
        """The places in the sample, in order, of what rank number ``index`` of the axis has; those from ``length`` on
        are padding."""
        at, part = divmod(index, self.ulysses)
        found: list[int] = []
        for start, stop in self.spans(length, at):
            size = (stop - start) // self.ulysses
            found += range(start + part * size, start + (part + 1) * size)
        return found

    def over_rows(self, rows: int) -> Division:
        """With so many rows at each place of the ring."""
        return Division(self.ulysses, self.ring * rows)

    def folded(self, batch: Batch, index: int, rows: int) -> Batch:
        """What the ``rows`` of rank number ``index`` have between them where there are fewer samples: each has some
        positions of all. Of what there is a row for each sample, there are then ``rows`` times as many; ``places`` is
        int64 [rows · samples, positions here]."""
        at, part = divmod(index, self.ulysses)
        further, samples = self.over_rows(rows), len(batch["tokens"])
        parts = [further.part(batch, (at * rows + row) * self.ulysses + part) for row in range(rows)]
        found = dict(parts[0])
        if "sample" in batch:
            found["sample"] = batch["sample"].repeat(rows)
        for name in ("tokens", "labels", "positions", "places"):
            if name in found:
                found[name] = torch.cat([one[name].expand(samples, -1) for one in parts])
        return found

    def part(self, batch: Batch, index: int) -> Batch:
        """What rank number ``index`` has of a micro-batch: tokens, labels and positions at its ``places`` (int64
        [positions here]). Documents stay whole: attention asks about those of all. ``counted`` (int64 [samples]) says
        how many of all positions of a sample count in the loss."""
        tokens = batch["tokens"]
        length = tokens.shape[1]
        places = torch.tensor(self.places(length, index), device=tokens.device)
        here = places.clamp(max=length - 1)
        found = dict(batch, tokens=tokens[:, here], positions=batch["positions"][:, here], places=places)
        if "labels" in batch:
            found["labels"] = batch["labels"][:, here].masked_fill(places >= length, IGNORED)
            found["counted"] = (batch["labels"] != IGNORED).sum(1)
        found["length"] = torch.tensor(length)  # on the CPU, where it is read
        return found


def score_entries(places: Iterable[int]) -> int:
    """How many scores causal attention has for queries at these ``places``."""
    return sum(place + 1 for place in places)


def padded_documents(documents: Tensor, length: int) -> Tensor:
    """``documents`` [samples, positions] with the last one going on up to ``length`` positions."""
    missing = length - documents.shape[1]
    return torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1) if missing else documents
