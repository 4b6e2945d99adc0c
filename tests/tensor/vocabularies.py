"""Hidden states, a matrix with a row for each token, and labels: how ranks may have them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from tensor_ranks import Array
from torch import Tensor

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import World
from shoal.layout.kinds import split_evenly
from shoal.model.loss import IGNORED
from shoal.tensor.ports import Even, Extent, Port, Ports, Positions, Repeated, Still
from shoal.tensor.samples import Samples
from shoal.tensor.vocabulary import Vocabulary, VocabularyCrossEntropy

ROWS_DIVIDED = ("repeated", "positions", "features")


@dataclass(frozen=True)
class Case:
    """Hidden states, an output matrix and labels, masked here and there; and what is divided over the ranks.

    Of ``repeated`` hidden states, their ``positions`` or their ``features``, with the rows of the vocabulary; of the
    ``samples``, with the in-features of a matrix that is gathered; or of the ``terms`` of the product, with features
    of both its factors.
    """

    ranks: int = 3
    kind: str = "repeated"
    vocab: int = 11
    samples: int = 2
    length: int = 7
    hidden: int = 6
    scale: float = 1.0
    dtype: torch.dtype = torch.float64
    chunk: int | None = None
    masked: bool = False
    z_loss: float = 0.0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, self.length, self.hidden, generator=generator, dtype=torch.float64) * self.scale
        weight = torch.randn(self.vocab, self.hidden, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocab, (self.samples, self.length), generator=generator)
        labels[0, 2:5] = IGNORED
        return x.to(self.dtype), weight.to(self.dtype), labels.fill_(IGNORED) if self.masked else labels

    # ---- how it lies

    def ports(self, world: World, *, loss: bool = False) -> Ports:
        """Of a linear that reads the stream; under the ``loss`` what has positions or samples are rows [1, rows, …]."""
        group = world.everyone
        x: dict[str, Port] = {
            "repeated": Repeated(group),
            "positions": Even(group, 1) if loss else Positions(group, extent=Extent(self.length)),
            "features": Even(group, -1),
        }
        y = Even(group, int(loss)) if self.kind == "terms" else Still()
        return Ports(x.get(self.kind, Still()), Even(group, -1) if self.kind == "samples" else Still(), y)

    def vocabulary(self, world: World) -> Vocabulary:
        alone = world.group((world.rank,), "none")
        return Vocabulary(self.vocab, world.everyone if self.kind in ROWS_DIVIDED else alone)

    def cross_entropy(self, world: World) -> VocabularyCrossEntropy:
        return VocabularyCrossEntropy(self.ports(world, loss=True), self.vocabulary(world), self.z_loss)

    def own_samples(self, world: World) -> Samples:
        return Samples(world.size, world.rank) if self.kind == "samples" else Samples()

    def matrix(self, world: World, weight: Tensor) -> Tensor:
        """This rank's block of an output matrix or embedding table."""
        if self.kind in ROWS_DIVIDED:
            return weight.split(split_evenly(self.vocab, world.size))[world.rank].clone()
        return weight.chunk(world.size, 1)[world.rank].clone()

    def stream(self, world: World, x: Tensor, padding: float = 0.0) -> Tensor:
        """This rank's block of the stream."""
        if self.kind == "positions":
            size = part_size(self.length, world.size)
            return pad(x, 1, size * world.size, padding)[:, world.rank * size :][:, :size].clone()
        if self.kind in ("features", "terms"):
            return x.chunk(world.size, -1)[world.rank].clone()
        return self.own_samples(world).of(x, padding).clone()

    # ---- from all ranks

    def streams(self, parts: list[Array], *, empty: bool = True) -> Array:
        """The stream from the ranks' blocks, in whose padding there is nothing if it is ``empty``."""
        if self.kind == "repeated":
            assert all((part == parts[0]).all() for part in parts)
            return parts[0]
        dim = {"positions": 1, "samples": 0}.get(self.kind, -1)
        whole = torch.cat([torch.from_numpy(part) for part in parts], dim)
        real = whole[: self.samples, : self.length]
        assert not empty or real.count_nonzero() == whole.count_nonzero(), "padding has no gradient and no contents"
        return real.numpy()  # type: ignore[no-any-return]

    def matrices(self, parts: list[Array]) -> Array:
        """The matrix from the ranks' blocks."""
        blocks = [torch.from_numpy(part) for part in parts]
        return torch.cat(blocks, 0 if self.kind in ROWS_DIVIDED else 1).numpy()  # type: ignore[no-any-return]

    def total(self, losses: list[float]) -> float:
        """The loss of all rows from the ranks', which have the same rows or each their own."""
        if self.kind not in ROWS_DIVIDED:
            return sum(losses)
        assert len(set(losses)) == 1, "the same on every rank, to the last bit"
        return losses[0]

    def words(self) -> float:
        """What the loss and its gradients move to and from each rank, if all rows are one chunk."""
        share, rows = (self.ranks - 1) / self.ranks, self.samples * self.length
        if self.kind == "samples":
            return 2 * share * self.vocab * self.hidden
        if self.kind == "terms":
            return 2 * share * part_size(rows, self.ranks) * self.ranks * self.vocab
        if self.kind == "positions":
            rows = self.samples * part_size(self.length, self.ranks) * self.ranks
        return 2 * share * rows * self.hidden + 3 * (self.ranks - 1) * rows


def differences(case: Case) -> str:
    """What sets a case apart."""
    values = {one.name: getattr(case, one.name) for one in fields(case) if getattr(case, one.name) != one.default}
    return "-".join(f"{name}={value}" for name, value in values.items()) or "plain"


def plain(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits, labels = (x @ weight.t()).flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1).square()[labels != IGNORED].sum()
