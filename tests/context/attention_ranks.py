"""Attention written down plainly, and queries, keys and values for it: the oracle of what ranks find together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.model.context import attention_mask


@dataclass(frozen=True)
class Case:
    """Attention of ``samples`` samples of ``length`` positions."""

    length: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    samples: int = 2
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    """Their lengths, by sample; none for one document."""

    @property
    def document_ids(self) -> Tensor | None:
        if not self.documents:
            return None
        return torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in self.documents])

    def inputs(self) -> list[Tensor]:
        """Queries, keys, values and the gradient of the result, [samples, heads, length, head_dim] float64."""
        generator = torch.Generator().manual_seed(self.length)
        return [
            torch.randn(self.samples, heads, self.length, self.head_dim, dtype=torch.float64, generator=generator)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


def plainly(case: Case) -> list[Tensor]:
    """The result and the gradients of queries, keys and values, with all scores at once."""
    q, k, v, grad = case.inputs()
    for one in (q, k, v):
        one.requires_grad_()
    group = case.heads // case.kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT * case.head_dim**-0.5
    mask = attention_mask(torch.zeros(1, case.length), case.document_ids, case.window)
    if mask is None:
        mask = torch.ones(case.length, case.length, dtype=torch.bool).tril()
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


CASES = {
    "causal": Case(16),
    "odd": Case(13),
    "one": Case(1),
    "one head of keys": Case(16, kv_heads=1),
    "window": Case(61, window=7),
    "short window": Case(32, window=1),
    "documents": Case(31, documents=((9, 1, 21), (31,))),
    "documents in a window": Case(63, window=11, documents=((20, 40, 3), (1, 2, 60))),
}
